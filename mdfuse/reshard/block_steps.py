"""The steps into blocks of a dim, out of them, and from some blocks to others.

An exchange brings each rank its missing elements for any parts, so that without a reduction one
communication attains the bound. A Partial is reduced before, on the way, or as plain parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mdfuse.communication import Communication
from mdfuse.layouts.exchange import kept_terms
from mdfuse.layouts.layout import Layout, Replicate
from mdfuse.reshard.clock import is_timed
from mdfuse.reshard.nodes import Carriers, spanned
from mdfuse.reshard.splits import splits_of
from mdfuse.reshard.step_cost import Step, step_cost, step_time

_Path = tuple[Step, ...]
#: the steps from one layout to another, for one shape and itemsize
_Find = Callable[[Layout, Layout], _Path]


def moved(source: Layout, destination: Layout) -> frozenset[int]:
    """Return the dims in blocks, before or afterwards, whose rows change on some rank.

    >>> from mdfuse import DeviceMesh, Shard
    >>> mesh = DeviceMesh.arange(tp=2)
    >>> thirds, halves = (Layout(mesh, {"tp": Shard(0, blocks=n)}) for n in (3, 2))
    >>> sorted(moved(thirds, halves)), sorted(moved(thirds, thirds))
    ([0], [])
    """
    return frozenset(
        d
        for d in {*source.blocked, *destination.blocked}
        if source.mesh != destination.mesh
        or source.cuts.get(d) != destination.cuts.get(d)
        or source.split_axes(d) != destination.split_axes(d)
    )


def through_blocks(
    source: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    find: _Find,
    carriers: Carriers = (),
) -> _Path:
    """Return the cheapest steps between layouts with a moved dim in blocks.

    Args:
        source: the layout before.
        destination: the layout afterwards, on any mesh.
        shape: global extents.
        itemsize: bytes of an element.
        find: plans a part of the path.
        carriers: as in `steps`; axes of several backends change separately, if possible.
    """
    timed = is_timed(source, destination, shape)

    def cost(way: _Path) -> tuple[int, int, int]:
        spent = (step_time(s, shape, itemsize) if timed else step_cost(s, shape) for s in way)
        posts = (s for s in way if isinstance(s, Communication))
        return sum(spanned(s.along, carriers) for s in posts), sum(spent), len(way)

    ways = [*_ways(source, destination, shape, find)]
    if all(cost(way)[0] for way in ways):
        ways += _one_by_one(source, destination, find, carriers)
    return min(ways, key=cost)


def _one_by_one(
    source: Layout, destination: Layout, find: _Find, carriers: Carriers
) -> Iterator[_Path]:
    """Yield paths on which one axis changes separately, first."""
    for axis, goal in destination.by_axis().items():
        between = source.with_placement(axis, goal) if source.placement(axis) != goal else source
        if between in (source, destination):
            continue
        first = Communication(kind="Exchange", source=source, destination=between)
        if not spanned(first.along, carriers):
            yield (*find(source, between), *find(between, destination))


def _ways(
    source: Layout, destination: Layout, shape: tuple[int, ...], find: _Find
) -> Iterator[_Path]:
    """Yield candidate paths: at once, reduced first, or with plain parts before or behind."""
    at_once = _at_once(source, destination)
    if at_once is not None:
        yield (at_once,)
    reduced = _reduced(source, destination)
    behind = _at_once(reduced, destination)
    if reduced != source and behind is not None:
        yield (*find(source, reduced), behind)
    if reduced != source:
        yield from _waiting(source, destination, find)
        yield from _in_shares(source, destination, shape, find)
    dims = moved(source, destination)
    ends = [x.without_blocks(dims) for x in (source, destination)]
    is_reduced = source.mesh == destination.mesh and bool(source.partial_axes)
    if at_once is None or is_reduced:
        legs = [(source, ends[0]), (ends[1], destination)]
        first, last = ([_at_once(*leg)] if leg[0] != leg[1] else [] for leg in legs)
        between = find(ends[0], ends[1]) if ends[0] != ends[1] else ()
        yield tuple(step for step in (*first, *between, *last) if step is not None)


def _waiting(source: Layout, destination: Layout, find: _Find) -> Iterator[_Path]:
    """Yield the path on which sums along axes that stay whole wait until others split them."""
    if source.mesh != destination.mesh:
        return
    between = destination
    for axis in source.partial_axes:
        if destination.placement(axis) == Replicate():
            between = between.with_placement(axis, source.placement(axis))
    first = _at_once(source, between) if between not in (source, destination) else None
    if first is not None and moved(source, between):
        yield (first, *find(between, destination))


def _in_shares(
    source: Layout, destination: Layout, shape: tuple[int, ...], find: _Find
) -> Iterator[_Path]:
    """Yield paths on which replicas, or holders of terms, reduce a share each."""

    def leg(before: Layout, after: Layout) -> _Path | None:
        if before.mesh == after.mesh and not moved(before, after):
            return find(before, after) if before != after else ()
        move = _at_once(before, after)
        return (move,) if move is not None else None

    staying = {a for a, _ in kept_terms(source, destination)}
    reduced = tuple(a for a in source.partial_axes if a not in staying)
    for split in (*splits_of(destination, (), shape), *splits_of(source, reduced, shape)):
        legs = leg(source, split), leg(split, destination)
        if legs[0] is not None and legs[1] is not None:
            yield (*legs[0], *legs[1])


def _reduced(source: Layout, destination: Layout) -> Layout:
    """Return the source after the reduction of all terms that do not stay."""
    staying = {a for a, _ in kept_terms(source, destination)}
    for axis in source.partial_axes:
        if axis not in staying:
            source = source.with_placement(axis, Replicate())
    return source


def _at_once(source: Layout, destination: Layout) -> Communication | None:
    """Return the single communication between two layouts; None if one does not suffice."""
    staying = kept_terms(source, destination)
    ops = {op for a, op in source.reduce_ops.items() if a not in dict(staying)}
    is_chunk = any(
        x.stream is not None and x.stream.index is not None for x in (source, destination)
    )
    if len(staying) < len(destination.reduce_ops) or len(ops) > 1 or (ops and is_chunk):
        return None
    return Communication(
        kind="ReduceExchange" if ops else "Exchange",
        source=source,
        destination=destination,
        reduce_op=next(iter(ops), None),
    )
