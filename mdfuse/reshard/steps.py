"""Find the steps that change a layout: the table *transition -> kinds*, and a search over its rows.

A change along one innermost axis is a row of the table. Any other change is the cheapest sequence
of rows, or one `Exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from mdfuse.communication import Communication
from mdfuse.errors import LayoutError
from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.kinds import KINDS
from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard
from mdfuse.layouts.narrowing import is_view_of
from mdfuse.layouts.recv_volume import UNIT, has_few_rows, is_lacking
from mdfuse.reshard.across import across
from mdfuse.reshard.block_steps import moved, through_blocks
from mdfuse.reshard.clock import is_timed
from mdfuse.reshard.nodes import Carriers, LayoutNode, Move, spanned
from mdfuse.reshard.search import Search
from mdfuse.reshard.step_cost import Local, Step, elements, step_time


def steps(
    source: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    itemsize: int = 4,
    carriers: Carriers = (),
) -> tuple[Step, ...]:
    """Find the steps that turn one layout into another.

    Args:
        source: the layout before.
        destination: the layout after.
        shape: global extents; they decide which of several paths sends the fewest bytes.
        itemsize: bytes of an element; if hosts are known, it decides which path is fastest.
        carriers: (axis, backend) of axes with a backend of their own; no collective goes along axes
            of several backends.

    Returns:
        Local steps and communications (without dtype) in order; none where nothing changes.

    Raises:
        LayoutError: the source cannot become the Partial that the destination is.

    >>> from mdfuse import DeviceMesh, Layout, Partial, Shard
    >>> mesh = DeviceMesh.arange(tp=4)
    >>> before, after = Layout(mesh, {"tp": Partial()}), Layout(mesh, {"tp": Shard(0)})
    >>> [str(step) for step in steps(before, after, (8,))]
    ['ReduceScatter[sum] axis=tp dim=0']
    """
    if is_symbolic(shape):  # what it assumes counts for its caller alone
        return _steps(source, destination, shape, itemsize, carriers)
    if source.mesh.hosts is None or destination.mesh.hosts is None:
        itemsize = 4  # it decides nothing
    return _known_steps(source, destination, shape, itemsize, carriers)


def _steps(
    source: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    itemsize: int = 4,
    carriers: Carriers = (),
) -> tuple[Step, ...]:
    if source == destination:
        return ()
    if source.mesh == destination.mesh:
        _check_into_partial(source, destination)
    if 0 in shape:
        return (Local(kind="empty", source=source, destination=destination),)
    if source.mesh.lost:  # only an exchange chooses its senders
        return (Communication(kind="Exchange", source=source, destination=destination),)
    held = _single_terms_reduced(source, destination)
    find = partial(steps, carriers=carriers)
    if held != source:
        alone = Local(kind="slice", source=source, destination=held)
        return (alone, *find(held, destination, shape, itemsize))
    if destination.reaches:
        return _reached(source, destination, shape, carriers, partial(find, itemsize=itemsize))
    if source.mesh == destination.mesh and moved(source, destination):
        return through_blocks(
            source, destination, shape, itemsize, lambda a, b: find(a, b, shape, itemsize), carriers
        )
    if source.mesh == destination.mesh:
        return _same_mesh(source, destination, shape, itemsize, carriers)
    return across(source, destination, shape, itemsize, find)


_known_steps = lru_cache(maxsize=4096)(_steps)


def in_fewer_posts(
    path: tuple[Step, ...], shape: tuple[int, ...], carriers: Carriers, spare: Callable[[], int]
) -> tuple[Step, ...]:
    """Return steps in which replicas share no work, if these are no more posts than a path.

    Args:
        path: the steps that bring the fewest bytes.
        shape: global extents.
        carriers: see `steps`.
        spare: returns `UNIT` times the elements that a rank may receive beyond those of the path.
    """
    chosen = path
    for way, excess in _plainer(path, shape, carriers):
        is_less = chosen is path or _posts(way) < _posts(chosen)
        if is_less and (excess <= 0 or excess <= spare()):
            chosen = way
    return chosen


def extra(path: tuple[Step, ...], shape: tuple[int, ...], carriers: Carriers) -> list[int]:
    """Return `UNIT` times the elements that each way in fewer posts brings beyond a path."""
    return [n for _, n in _plainer(path, shape, carriers) if n > 0]


def _plainer(
    path: tuple[Step, ...], shape: tuple[int, ...], carriers: Carriers
) -> Iterator[tuple[tuple[Step, ...], int]]:
    """Yield ways in the place of a path, and `UNIT` times the elements that they bring beyond it.

    One is no more posts, in which replicas share no work; the other, if any, is fewer posts. Sums
    of few rows over steps say little of the busiest rank: the bound takes the place of the path.
    """
    if _posts(path) < 2:
        return
    source, goal = path[0].source, path[-1].destination
    is_one = source.mesh == goal.mesh and not goal.reaches and not moved(source, goal)
    if not (is_one and source.partial_axes) or source.stream or is_timed(source, goal, shape):
        return
    find = _plain_steps if is_symbolic(shape) else _known_plain_steps
    plain = find(source, goal, shape, carriers)
    ways = [plain] if _posts(plain) <= _posts(path) else []
    if not is_symbolic(shape) and min(map(_posts, (path, plain))) > len(source.partial_axes):
        scattered = _scattered_first(source, goal, shape, carriers)
        ways += [scattered] if _posts(scattered) < _posts(path) else []
    for way in ways:
        least = received(path, shape)
        if any(has_few_rows(step.destination, shape) for step in (*way, *path)):
            search = _search(source, goal, shape, 4, carriers)
            least = search.least_arriving(search.start)
        yield way, received(way, shape) - least


def _posts(path: Sequence[Step]) -> int:
    return sum(isinstance(step, Communication) for step in path)


def _scattered_first(
    source: Layout, goal: Layout, shape: tuple[int, ...], carriers: Carriers
) -> tuple[Step, ...]:
    """Return steps that bring Partials to the splits of a goal, and reduce the others behind.

    Where parts are padded, these may take a little more than one reduction along all axes.
    """
    scattered = source
    for axis in source.partial_axes:
        if isinstance(placement := goal.placement(axis), Shard):
            scattered = scattered.with_placement(axis, placement)
    first, then = ((source, scattered), (scattered, goal))
    return (*steps(*first, shape, carriers=carriers), *steps(*then, shape, carriers=carriers))


def _plain_steps(
    source: Layout, goal: Layout, shape: tuple[int, ...], carriers: Carriers
) -> tuple[Step, ...]:
    """Return the cheapest steps in which replicas share no work."""
    search = _search(source, goal, shape, 4, carriers)
    search = replace(search, is_plain=True, known_dims={}, known_moves={})
    return tuple([_step(search, node, move) for node, move in search.path()])


_known_plain_steps = lru_cache(maxsize=1024)(_plain_steps)


def received(path: Sequence[Step], shape: tuple[int, ...]) -> int:
    """Return `UNIT` times the elements that a rank receives in some steps."""
    return sum(elements(step, shape) for step in path)


def _single_terms_reduced(source: Layout, destination: Layout) -> Layout:
    """Return the source with single terms reduced, which needs no communication."""
    is_one = source.mesh == destination.mesh
    for axis in source.partial_axes:
        stays = is_one and isinstance(destination.placement(axis), Partial)
        if source.mesh.axis_size(axis) == 1 and not stays:
            source = source.with_placement(axis, Replicate())
    return source


def _reached(
    source: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    carriers: Carriers,
    find: Callable[..., tuple[Step, ...]],
) -> tuple[Step, ...]:
    """Return the steps to parts with halos: a last exchange brings each rank its missing rows.

    One exchange brings the halos of several dims, for any backends: corner rows come from ranks
    that are neighbours along no axis.
    """
    last = Communication(kind="Exchange", source=source, destination=destination)
    is_direct = source.mesh == destination.mesh and source.reduce_ops == destination.reduce_ops
    if is_direct and not spanned(last.along, carriers):
        return (_without_idle_posts(last, shape),)
    before = find(source, destination.without_reaches, shape)
    held = before[-1].destination if before else source
    return (*before, _without_idle_posts(replace(last, source=held), shape))


def cost(
    source: Layout, destination: Layout, shape: tuple[int, ...], carriers: Carriers = ()
) -> int:
    """Return `UNIT` times the elements that a rank receives in a change of layout."""
    find = _cost if is_symbolic(shape) else _known_cost
    return find(source, destination, shape, carriers)


def _cost(source: Layout, destination: Layout, shape: tuple[int, ...], carriers: Carriers) -> int:
    return received(steps(source, destination, shape, carriers=carriers), shape)


_known_cost = lru_cache(maxsize=4096)(_cost)


#: Reduce op -> a dtype of one byte that it takes, where integers are none.
_BYTES: Mapping[str | None, torch.dtype] = {"avg": torch.float8_e5m2}


def arrivals(source: Layout, destination: Layout, shape: tuple[int, ...]) -> Any:
    """Return `UNIT` times the elements that each rank receives: an array, in the mesh's order.

    >>> from mdfuse import DeviceMesh, Layout, Shard
    >>> mesh = DeviceMesh.arange(tp=2)
    >>> arrivals(Layout(mesh, {"tp": Shard(0)}), Layout(mesh, {"tp": Shard(1)}), (3, 5)) // UNIT
    array([3, 4])
    """
    path = steps(source, destination, shape)
    sent = [  # elements of one byte, of a dtype that the reduce op takes
        replace(step, shape=shape, dtype=_BYTES.get(step.reduce_op, torch.int8))
        for step in path
        if isinstance(step, Communication)
    ]
    ranks = destination.mesh.ranks
    return np.array([UNIT * sum(c.bytes_received(rank) for c in sent) for rank in ranks])


def time(source: Layout, destination: Layout, shape: tuple[int, ...], itemsize: int) -> int:
    """Return the time of a change of layout in nanoseconds, between meshes with known hosts.

    >>> from mdfuse import DeviceMesh, Layout, Shard
    >>> mesh = DeviceMesh.arange(tp=2).with_hosts([0, 1])
    >>> time(Layout(mesh, {"tp": Shard(0)}), Layout(mesh), (2700,), 4)
    10200
    """
    path = steps(source, destination, shape, itemsize)
    return sum(step_time(step, shape, itemsize) for step in path)


def costs(
    sources: Sequence[Layout], destination: Layout, shape: tuple[int, ...], itemsize: int
) -> list[int]:
    """Return the costs of several changes to one layout: times, if all of these are known."""
    if all(is_timed(source, destination, shape) for source in sources):
        return [time(source, destination, shape, itemsize) for source in sources]
    return [cost(source, destination, shape) for source in sources]


def elements_received(
    source: Layout, destination: Layout, shape: tuple[int, ...], carriers: Carriers = ()
) -> float:
    """Return the largest receive volume of a rank, in elements; see `steps`."""
    return cost(source, destination, shape, carriers) / UNIT


def _check_into_partial(source: Layout, destination: Layout) -> None:
    before = source.by_axis()
    for axis, after in destination.by_axis().items():
        now = before[axis]
        if isinstance(after, Partial) and isinstance(now, Partial) and now != after:
            raise LayoutError(
                f"axis {axis}: {now} cannot become {after}",
                because="what two reduce ops make of the same terms are different values",
                hint="make it Replicate() first with another set, or leave it Partial",
            )


def _same_mesh(
    source: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    carriers: Carriers,
) -> tuple[Step, ...]:
    """Take one row of the table where none is cheaper, else the cheapest sequence."""
    if source.stream != destination.stream:
        step = Communication(kind="Exchange", source=source, destination=destination)
        return (_without_idle_posts(step, shape),)
    search = _search(source, destination, shape, itemsize, carriers)
    direct = search.direct
    path = [direct] if direct is not None else search.path()
    return tuple([_step(search, node, move) for node, move in path])


def _search(
    source: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    carriers: Carriers,
) -> Search:
    """Return a search; searches without a Partial to one layout share their node tables.

    Many paths between meshes end in one layout.
    """
    search = Search(source, destination, shape, itemsize, carriers)
    is_plain = not (source.partial_axes or destination.partial_axes or search.has_idle_axes)
    if is_plain and search.is_timed and source.stream is None and not search.is_mixed:
        first = _first_search(destination, shape, itemsize, carriers)
        for name in _SHARED:
            setattr(search, name, getattr(first, name))
    return search


#: what of a search is about nodes and where they go to, and not about where it starts
_SHARED = ("known_dims", "known_moves", "left", "leasts", "times")


@lru_cache(maxsize=64)
def _first_search(
    destination: Layout, shape: tuple[int, ...], itemsize: int, carriers: Carriers
) -> Search:
    return Search(destination, destination, shape, itemsize, carriers)


def _step(search: Search, node: LayoutNode, move: Move) -> Step:
    """Return a move of the search as a step."""
    source, destination = search.layout(node), search.layout(move.after)
    if move.kind in ("slice", "term"):
        return Local(kind=move.kind, source=source, destination=destination)
    if not KINDS[move.kind].reduces and not search.is_lacking(node, move.after):
        return Local(kind="slice", source=source, destination=destination)
    op = search.ops[(*move.axes, *node.partial)[0]] if KINDS[move.kind].reduces else None
    return Communication(
        kind=move.kind,
        source=source,
        destination=destination,
        axes=tuple(source.mesh.axes[a] for a in move.axes),
        dim=move.dim,
        to_dim=move.to_dim,
        reduce_op=op,
    )


def _without_idle_posts(step: Step, shape: tuple[int, ...]) -> Step:
    """Replace a step by a local slice if no rank lacks elements, as with short dims."""
    if isinstance(step, Local) or step.reduce_op is not None:
        return step
    before, after = step.source, step.destination
    if is_lacking(before, after, shape):
        return step
    has_blocks = before.blocked or after.blocked
    if has_blocks and not all(is_view_of(before, after, shape, r) for r in after.mesh):
        return step
    return Local(kind="slice", source=step.source, destination=step.destination)


def with_type(step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """Return the step for a tensor of this shape and dtype."""
    return replace(step, shape=shape, dtype=dtype) if isinstance(step, Communication) else step
