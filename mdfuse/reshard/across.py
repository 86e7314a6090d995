"""The steps from one mesh to another.

One form serves all: reduce into a split, move that, gather it. The split is that of the destination
over the ranks that are to hold the same, or over the ranks of the source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import combinations

from mdfuse.communication import Communication
from mdfuse.layouts.exchange import kept_terms
from mdfuse.layouts.lacks import is_lacking
from mdfuse.layouts.layout import Layout, Replicate, Shard, replicated
from mdfuse.mesh import DeviceMesh
from mdfuse.reshard.blocks import through_blocks
from mdfuse.reshard.clock import is_timed, least_arriving
from mdfuse.reshard.refined import on_common_mesh
from mdfuse.reshard.splits import free_dims, placed, splits_of
from mdfuse.reshard.step import Local, Step, step_cost, step_time

_Steps = Callable[[Layout, Layout, tuple[int, ...], int], tuple[Step, ...]]
_Path = tuple[Step, ...]
#: the same for one itemsize
_Find = Callable[[Layout, Layout, tuple[int, ...]], _Path]
#: Steps that reduce, what finds those that follow, and whether other ranks receive in these.
_Way = tuple[_Path, Callable[[], _Path], bool]


def across(
    source: Layout, destination: Layout, shape: tuple[int, ...], itemsize: int, find: _Steps
) -> tuple[Step, ...]:
    """Return the steps from one mesh to another; `find` finds those of a part of the way."""

    def steps(before: Layout, after: Layout, shape: tuple[int, ...]) -> _Path:
        return find(before, after, shape, itemsize) if before != after else ()

    common = on_common_mesh(source, destination, shape)
    if common is not None:
        before = _as_it_is(source, common[0]) if source != common[0] else ()
        after = _as_it_is(common[1], destination) if common[1] != destination else ()
        return (*before, *steps(*common, shape), *after)
    if source.blocked or destination.blocked:
        return through_blocks(source, destination, shape, itemsize, lambda a, b: steps(a, b, shape))
    kept = kept_terms(source, destination)
    if destination.reduce_ops and len(kept) < len(destination.reduce_ops):
        ways = (
            (steps(source, x, shape), partial(steps, x, destination, shape), False)
            for x in _before_terms(destination, shape)
        )
        return _cheapest(ways, source, destination, shape, itemsize)
    if len(kept) < len(source.reduce_ops):
        found = _reducing(source, destination, shape, steps)
    elif not kept and not is_lacking(source, destination, shape):
        return _as_it_is(source, destination)
    else:
        found = _moved(source, destination, shape, steps)
    return _cheapest(found, source, destination, shape, itemsize)


def _before_terms(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Yield layouts that become a Partial without communication: whole, or split in its place.

    Of a split each rank's term is its part, and elsewhere what leaves others as they are.
    """
    axes = layout.partial_axes
    whole = placed(layout, axes, Replicate())
    yield whole
    parts = math.prod(map(layout.mesh.axis_size, axes))
    room = whole.local_shape(shape)
    if "avg" not in layout.reduce_ops.values():
        for dim in free_dims(layout, shape):
            if room[dim] >= parts:
                yield placed(whole, axes, Shard(dim))


def _cheapest(
    ways: Iterable[_Way],
    source: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    itemsize: int,
) -> _Path:
    """Return the steps of the way that costs least; of two equal ones, the first."""
    if is_timed(source, destination, shape):
        least = least_arriving(source.mesh, destination, shape, itemsize)
        return _soonest(ways, destination, shape, itemsize, least)
    followed = ((first, rest(), is_apart) for first, rest, is_apart in ways)
    first, then, _ = min(followed, key=lambda way: _cost(way, shape))
    return (*first, *then)


def _cost(way: tuple[_Path, _Path, bool], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return what the steps cost, and how many there are; extents may be symbolic."""
    first, rest = (sum(step_cost(step, shape) for step in path) for path in way[:2])
    if not way[2]:
        return first + rest, len(way[0]) + len(way[1])
    return first if first > rest else rest, len(way[0]) + len(way[1])


def _soonest(
    ways: Iterable[_Way], goal: Layout, shape: tuple[int, ...], itemsize: int, least: int
) -> _Path:
    """Return the steps of the way to a goal that takes least time, which `least` is at least.

    One that is known not to take less is not followed to its end.
    """
    found: _Path = ()
    best: tuple[float, int] = (math.inf, 0)
    for first, rest, is_apart in ways:
        spent = _spent(first, shape, itemsize, best[0])
        is_there = bool(first) and first[-1].destination == goal
        if (max(spent, least), len(first) + (not is_there)) >= best:
            continue
        then = rest()
        more = _spent(then, shape, itemsize, best[0] if is_apart else best[0] - spent)
        cost = max(spent, more) if is_apart else spent + more
        if (cost, len(first) + len(then)) < best:
            found, best = (*first, *then), (cost, len(first) + len(then))
    return found


def _as_it_is(source: Layout, destination: Layout) -> _Path:
    return (Local(kind="slice", source=source, destination=destination),)


def _spent(path: _Path, shape: tuple[int, ...], itemsize: int, limit: float) -> int:
    """Return how many nanoseconds steps take, or more than the limit."""
    spent = 0
    for step in path:
        if spent > limit:
            break
        spent += step_time(step, shape, itemsize, limit - spent)
    return spent


def _moved(
    source: Layout, destination: Layout, shape: tuple[int, ...], steps: _Find
) -> Iterator[_Way]:
    """Yield ways of a value that is not reduced: at once; where hosts are known, also in parts.

    A host may take in one copy, each of its ranks a part, and gather that: or a host that has it
    may cut it up first.
    """
    yield (), partial(_moving, source, destination, shape), False
    if is_timed(source, destination, shape):
        for split in _finer(destination, shape):
            rest = partial(steps, split, destination, shape)
            yield _moving(source, split, shape), rest, False


def _moving(source: Layout, destination: Layout, shape: tuple[int, ...]) -> _Path:
    """Return the one communication of a value that is not reduced."""
    before, after = _only_split(source), _only_split(destination)

    def one(kind: str, dim: int | None = None, *axes: str) -> _Path:
        return (
            Communication(kind=kind, source=source, destination=destination, dim=dim, axes=axes),
        )

    if source.mesh.size == destination.mesh.size == 1:
        return one("SendRecv")
    if source.is_replicated and destination.is_replicated:
        return one("Broadcast")
    if source.mesh.size == 1 and after is not None:
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


def _reducing(
    source: Layout, destination: Layout, shape: tuple[int, ...], steps: _Find
) -> Iterator[_Way]:
    """Yield ways of a Partial to another mesh; of two equal ones the first is taken."""
    kept = dict(kept_terms(source, destination))
    axes = tuple(a for a in source.partial_axes if a not in kept)
    ops = {source.reduce_ops[a] for a in axes if a in source.reduce_ops}
    root = _to_one_rank(source, destination, ops)
    if root is not None:
        first, at_root = root
        yield (first,), partial(steps, at_root, destination, shape), True
    is_apart = _are_apart(source.mesh, destination.mesh)
    for done in splits_of(source, axes, shape):
        yield steps(source, done, shape), partial(steps, done, destination, shape), is_apart
    if len(ops) == 1 and not kept and source.stream is None:
        (op,) = ops
        for split in splits_of(destination, (), shape):
            reduced = Communication(
                kind="ReduceExchange", source=source, destination=split, reduce_op=op
            )
            yield (reduced,), partial(steps, split, destination, shape), False


@lru_cache(maxsize=256)
def _are_apart(one: DeviceMesh, other: DeviceMesh) -> bool:
    return not any(r in one for r in other)


def _to_one_rank(
    source: Layout, destination: Layout, ops: set[str]
) -> tuple[Communication, Layout] | None:
    """Return the Reduce to one rank that sends on, where all ranks have terms of one whole."""
    mesh = source.mesh
    is_one = len(source.reduce_ops) == 1 and mesh.axis_size(*source.reduce_ops) == mesh.size
    if not is_one or not destination.is_replicated:
        return None
    root = next((r for r in destination.mesh.ranks if r in mesh), mesh.first)
    at_root = replicated(mesh.alone(root)).with_stream(source.stream)
    if destination.mesh.ranks == (root,):
        at_root = destination
    (op,) = ops
    return Communication(kind="Reduce", source=source, destination=at_root, reduce_op=op), at_root


def _finer(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Yield a layout with some axes along which it is whole splitting one dim."""
    free = [a for a, p in layout.by_axis().items() if isinstance(p, Replicate)]
    free = [a for a in free if layout.mesh.axis_size(a) > 1]
    room = layout.local_shape(shape)
    for dim in free_dims(layout, shape):
        for n in range(1, len(free) + 1):
            for axes in combinations(free, n):
                if room[dim] >= math.prod(map(layout.mesh.axis_size, axes)):
                    yield placed(layout, axes, Shard(dim))
