"""Find the steps that change a layout: the table *transition -> kinds*, and a search over its rows.

Where one innermost axis changes, this is a row of the table. Otherwise it is the cheapest sequence
of rows, or one `Exchange`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice

import torch

from mdfuse.communication import Communication
from mdfuse.errors import LayoutError
from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.boxes import box_size, intersect
from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard, commute, replicated
from mdfuse.mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A step without communication.

    "slice": each rank keeps a part of what it has. "zeros": each rank puts what it has into zeros
    of the destination's size, which makes it Partial(sum). "empty": the tensor has no elements.
    """

    kind: str
    source: Layout
    destination: Layout


Step = Local | Communication


#: Costs are whole numbers of this part of an element, so that they compare exactly: it is divisible
#: by most sizes of axes.
_UNIT = 8192 * 3 * 3 * 5 * 7


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
    """Return how many elements arrive at a rank for a change of layout, times `_UNIT`."""
    return sum(_step_cost(step, shape) for step in steps(source, destination, shape))


def elements_received(source: Layout, destination: Layout, shape: tuple[int, ...]) -> float:
    """Return how many elements arrive at the rank that receives most."""
    return cost(source, destination, shape) / _UNIT


def _check_into_partial(source: Layout, destination: Layout) -> None:
    before = source.by_axis()
    for axis, after in destination.by_axis().items():
        if not isinstance(after, Partial) or before[axis] == after:
            continue
        ops = {Replicate: ("sum", "min", "max", "avg"), Shard: ("sum",), Partial: ()}
        if after.op not in ops[type(before[axis])]:
            raise LayoutError(
                f"axis {axis}: {before[axis]} cannot become {after}",
                because="R becomes P(sum), P(min), P(max) or P(avg), and S(d) becomes P(sum)",
                hint="make it Replicate() first with another set, or leave it Partial",
            )


def _same_mesh(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Take one row of the table where one suffices, else the cheapest sequence (Dijkstra)."""
    direct = _direct(source, destination)
    if direct is not None:
        return (direct,)
    tick = count()
    frontier: list[tuple[int, int, int, Layout, tuple[Step, ...]]] = [
        (0, 0, next(tick), source, ())
    ]
    done: set[Layout] = set()
    while frontier:
        spent, weight, _, here, path = heapq.heappop(frontier)
        if here == destination:
            return path
        if here in done:
            continue
        done.add(here)
        for step in _moves(here, destination):
            effort = weight + _effort(step, path)
            total = spent + _step_cost(step, shape)
            item = (total, effort, next(tick), step.destination, (*path, step))
            heapq.heappush(frontier, item)
    raise AssertionError(f"no way from {source} to {destination}")


def _effort(step: Step, path: tuple[Step, ...]) -> int:
    """Return the weight of a step, which decides between paths of equal bytes.

    Two collectives come before one Exchange, which comes before a collective whose result is
    sliced (some ranks then receive what they throw away).
    """
    if isinstance(step, Local):
        return 3 if any(isinstance(s, Communication) for s in path) else 1
    return 3 if step.axis is None else 1


def _without_idle_posts(step: Step, shape: tuple[int, ...]) -> Step:
    """Replace a step by a local slice where no rank lacks anything, as with short dims."""
    if isinstance(step, Local) or step.reduce_op is not None:
        return step
    if _is_lacking(step.source, step.destination, shape):
        return step
    return Local(kind="slice", source=step.source, destination=step.destination)


def _direct(source: Layout, destination: Layout) -> Step | None:
    """Return the row for a change along one axis, innermost before and after; else None."""
    before, after = source.by_axis(), destination.by_axis()
    changed = [a for a in before if before[a] != after[a]]
    if len(changed) != 1:
        return None
    (axis,) = changed
    for step in _axis_moves(source, axis, destination):
        if step.destination == destination:
            return step
    return None


def _moves(here: Layout, destination: Layout) -> Iterator[Step]:
    for axis in here.mesh.axes:
        yield from _axis_moves(here, axis, destination)
    goal = destination
    for axis in destination.partial_axes:  # becoming Partial is a local step of its own
        if here.placement(axis) != destination.placement(axis):
            goal = goal.with_placement(axis, Replicate())
    if here.partial_axes == goal.partial_axes and here != goal:
        yield Communication(kind="Exchange", source=here, destination=goal)


def _axis_moves(here: Layout, axis: str, destination: Layout) -> Iterator[Step]:
    """Yield the one-axis rows of the table that can help on the way to a destination.

    A Partial that the destination keeps stays as it is: made whole and Partial again, it would be
    another value for an op that is not idempotent.
    """
    now, goal = here.placement(axis), destination.placement(axis)
    if isinstance(now, Partial) and now == goal:
        return
    is_made = isinstance(goal, Partial) and commute((*here.reduce_ops.values(), goal.op))
    to = goal.dim if isinstance(goal, Shard) else None

    def step(kind: str, layout: Layout, **more: int | str | None) -> Communication:
        fields = {"kind": kind, "source": here, "destination": layout, "axis": axis, **more}
        return Communication(**fields)  # type: ignore[arg-type]

    gathered = here.with_placement(axis, Replicate())
    if isinstance(now, Partial):
        yield step("Allreduce", gathered, reduce_op=now.op)
        if to is not None:
            split = gathered.with_placement(axis, Shard(to))
            yield step("ReduceScatter", split, reduce_op=now.op, dim=to)
    elif isinstance(now, Replicate):
        if to is not None:
            split = here.with_placement(axis, Shard(to))
            yield Local(kind="slice", source=here, destination=split)
        elif is_made:
            kind = "zeros" if goal == Partial("sum") else "slice"
            made = here.with_placement(axis, goal)
            yield Local(kind=kind, source=here, destination=made)
    elif isinstance(now, Shard) and here.split_axes(now.dim)[-1] == axis:
        yield step("Allgather", gathered, dim=now.dim)
        if to is not None and to != now.dim:
            moved = gathered.with_placement(axis, Shard(to))
            yield step("AllToAll", moved, dim=now.dim, to_dim=to)
        elif is_made:
            made = gathered.with_placement(axis, goal)
            yield Local(kind="zeros", source=here, destination=made)


def _step_cost(step: Step, shape: tuple[int, ...]) -> int:
    """Return how many elements arrive at a rank, without padding, times `_UNIT`."""
    if isinstance(step, Local):
        return 0
    before = math.prod(step.source.local_shape(shape))
    if step.kind == "Exchange":
        return _UNIT * _lacking(step.source, step.destination, shape)
    if step.kind in ("SendRecv", "Broadcast", "Gather", "Scatter", "Reduce"):
        return _UNIT * max(before, math.prod(step.destination.local_shape(shape)))
    n = step.size
    if step.kind == "Allgather":
        return _UNIT * before * (n - 1)
    return _UNIT * before * (n - 1) * (2 if step.kind == "Allreduce" else 1) // n


def _lacking(source: Layout, destination: Layout, shape: tuple[int, ...], sample: int = 64) -> int:
    """Return the most elements that a rank lacks, of a sample of ranks spread over the mesh."""
    mesh = destination.mesh
    stride = max(1, mesh.size // sample)
    worst = 0
    for rank in islice(mesh, 0, None, stride):
        worst = max(worst, _lacks(source, destination, shape, rank))
    return worst


def _is_lacking(source: Layout, destination: Layout, shape: tuple[int, ...]) -> bool:
    """Whether some rank has no part of the source, or needs more than its part."""
    return any(
        rank not in source.mesh or _lacks(source, destination, shape, rank)
        for rank in destination.mesh
    )


def _lacks(source: Layout, destination: Layout, shape: tuple[int, ...], rank: int) -> int:
    need = destination.intervals(shape, rank)
    if rank not in source.mesh:
        return box_size(need)
    both = intersect(need, source.intervals(shape, rank))
    return box_size(need) - (box_size(both) if both is not None else 0)


def _across(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the steps from one mesh to another."""
    if source.partial_axes:
        return _reduce_across(source, destination, shape)
    if not _is_lacking(source, destination, shape):
        return (Local(kind="slice", source=source, destination=destination),)
    before, after = _only_split(source), _only_split(destination)

    def one(kind: str, dim: int | None = None, axis: str | None = None) -> tuple[Step, ...]:
        return (
            Communication(kind=kind, source=source, destination=destination, dim=dim, axis=axis),
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
