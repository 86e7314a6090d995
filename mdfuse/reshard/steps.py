"""Find the steps that change a layout: the table *transition -> kinds*, and a search over its rows.

Where one innermost axis changes, this is a row of the table. Otherwise it is the cheapest sequence
of rows, or one `Exchange`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from mdfuse.communication import Communication
from mdfuse.errors import LayoutError
from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.kinds import KINDS, POINT_TO_POINT
from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard, replicated
from mdfuse.mesh import DeviceMesh
from mdfuse.reshard.lacks import UNIT, arriving, is_lacking, part_size, worst_lack
from mdfuse.reshard.search import Move, Node, Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A step without communication.

    "slice": each rank keeps a part of what it has. "term": it becomes Partial, by what one rank has
    and what the reduce op leaves that as it is with. "empty": the tensor has no elements.
    """

    kind: str
    source: Layout
    destination: Layout


Step = Local | Communication


def steps(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Find the steps that turn one layout into another.

    Args:
        source: the layout before.
        destination: the layout after.
        shape: global extents; they decide which of several ways sends the fewest bytes.

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
    if is_symbolic(shape):
        return _steps(source, destination, shape)  # what it assumes counts for its caller alone
    return _known_steps(source, destination, shape)


def _steps(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    if source == destination:
        return ()
    if source.mesh == destination.mesh:
        _check_into_partial(source, destination)
    elif destination.partial_axes:
        raise LayoutError(
            f"{source} on {source.mesh} cannot become {destination} on {destination.mesh}",
            because="only a Partial on the same mesh can be made",
            hint="move the value first, then make it Partial",
        )
    if 0 in shape:
        return (Local(kind="empty", source=source, destination=destination),)
    if source.mesh == destination.mesh:
        path = _same_mesh(source, destination, shape)
        return tuple(_without_idle_posts(step, shape) for step in path)
    return _across(source, destination, shape)


_known_steps = lru_cache(maxsize=4096)(_steps)


def cost(source: Layout, destination: Layout, shape: tuple[int, ...]) -> int:
    """Return how many elements arrive at a rank for a change of layout, times `UNIT`."""
    return sum(_step_cost(step, shape) for step in steps(source, destination, shape))


def _step_cost(step: Step, shape: tuple[int, ...]) -> int:
    """Return how many elements arrive at a rank, padding included, times `UNIT`."""
    if isinstance(step, Local):
        return 0
    before, after = (part_size(x, shape) for x in (step.source, step.destination))
    if step.kind in POINT_TO_POINT and step.kind != "SendRecv":
        copies = 0
        if step.reduce_op is not None:
            copies = math.prod(map(step.source.mesh.axis_size, step.source.partial_axes)) - 1
        return UNIT * worst_lack(step.source, step.destination, shape, copies)
    if step.kind in ("SendRecv", "Broadcast", "Gather", "Scatter", "Reduce"):
        return UNIT * max(before, after)
    return arriving(step.kind, step.size, before, after)


def elements_received(source: Layout, destination: Layout, shape: tuple[int, ...]) -> float:
    """Return how many elements arrive at the rank that receives most."""
    return cost(source, destination, shape) / UNIT


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


def _same_mesh(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Take one row of the table where none is cheaper, else the cheapest sequence."""
    if source.stream != destination.stream:
        return (Communication(kind="Exchange", source=source, destination=destination),)
    search = Search(source, destination, shape)
    path = [search.direct] if search.direct is not None else search.path()
    return tuple(_step(search, here, move) for here, move in path)


def _step(search: Search, here: Node, move: Move) -> Step:
    """Return a move of the search as a step."""
    source, destination = search.layout(here), search.layout(move.after)
    if move.kind in ("slice", "term"):
        return Local(kind=move.kind, source=source, destination=destination)
    op = search.ops[(*move.axes, *here.partial)[0]] if KINDS[move.kind].reduces else None
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
    """Replace a step by a local slice where no rank lacks anything, as with short dims."""
    if isinstance(step, Local) or step.reduce_op is not None:
        return step
    if is_lacking(step.source, step.destination, shape):
        return step
    return Local(kind="slice", source=step.source, destination=step.destination)


def _across(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the steps from one mesh to another."""
    if source.partial_axes:
        return _reduce_across(source, destination, shape)
    if not is_lacking(source, destination, shape):
        return (Local(kind="slice", source=source, destination=destination),)
    before, after = _only_split(source), _only_split(destination)

    def one(kind: str, dim: int | None = None, *axes: str) -> tuple[Step, ...]:
        return (
            Communication(kind=kind, source=source, destination=destination, dim=dim, axes=axes),
        )

    if source.is_replicated and destination.is_replicated:
        return one("Broadcast")
    if source.is_replicated and after is not None:
        return one("Scatter", after[1], after[0])
    if before is not None and destination.is_replicated and destination.mesh.size == 1:
        return one("Gather", before[1], before[0])
    if before and after and before[1] == after[1] and source.mesh.size == destination.mesh.size:
        return one("SendRecv")
    return one("Exchange")


def _only_split(layout: Layout) -> tuple[str, int] | None:
    """(axis, dim) where one axis splits one dim and the mesh has no other ranks."""
    if len(layout.splits) != 1 or len(layout.splits[0][1]) != 1:
        return None
    dim, (axis,) = layout.splits[0]
    return (axis, dim) if layout.mesh.axis_size(axis) == layout.mesh.size else None


def _reduce_across(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Reduce to one rank that sends on, where that is enough; else reduce-scatter first."""
    mesh, (axis, *_) = source.mesh, source.partial_axes
    placement = source.placement(axis)
    assert isinstance(placement, Partial)
    if mesh.axis_size(axis) == mesh.size and destination.is_replicated:
        root = next((r for r in destination.mesh.ranks if r in mesh), mesh.first)
        at_root = replicated(DeviceMesh([root])).with_stream(source.stream)
        if destination.mesh.ranks == (root,):
            at_root = destination
        reduced = Communication(
            kind="Reduce", source=source, destination=at_root, reduce_op=placement.op
        )
        if at_root == destination:
            return (reduced,)
        if destination.mesh.size == 1:
            sent = Communication(kind="SendRecv", source=at_root, destination=destination)
            return (reduced, sent)
        return (reduced, *steps(at_root, destination, shape))
    done = source
    chunked = source.stream.dim if source.stream is not None else None  # no rank splits a chunk
    for axis in source.partial_axes:
        n = mesh.axis_size(axis)
        gathered = done.with_placement(axis, Replicate())
        room = gathered.local_shape(shape)
        dims = (d for d, extent in enumerate(room) if extent >= n and d != chunked)
        dim = next(dims, None)
        done = gathered if dim is None else gathered.with_placement(axis, Shard(dim))
    return (*steps(source, done, shape), *steps(done, destination, shape))


def with_type(step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """Return the step for a tensor of this shape and dtype."""
    return replace(step, shape=shape, dtype=dtype) if isinstance(step, Communication) else step
