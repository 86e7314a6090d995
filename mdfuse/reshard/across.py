"""The steps from one mesh to another.

All plans have one form: reduce into a split, move the split, gather it. The split divides the work
among the destination's replicas, or among the source's ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import combinations
from typing import NamedTuple

from mdfuse.communication import Communication
from mdfuse.layouts.exchange import kept_terms
from mdfuse.layouts.layout import Layout, Replicate, Shard, replicated
from mdfuse.layouts.recv_volume import (
    have_no_rank_in_common,
    is_lacking,
    is_special,
)
from mdfuse.reshard.block_steps import through_blocks
from mdfuse.reshard.clock import is_timed
from mdfuse.reshard.refined import on_common_mesh
from mdfuse.reshard.splits import free_dims, placed, splits_of
from mdfuse.reshard.step_cost import Local, Step, step_cost, step_time

_Steps = Callable[[Layout, Layout, tuple[int, ...], int], tuple[Step, ...]]
_Path = tuple[Step, ...]
#: the same for one itemsize
_Find = Callable[[Layout, Layout, tuple[int, ...]], _Path]


class _LegsPath(NamedTuple):
    """A candidate path of several legs, each planned lazily.

    Attributes:
        legs: one function per leg, which returns its steps.
        is_apart: whether the legs have disjoint receivers, so that the longer leg alone counts.
        is_last_first: whether to plan the last leg first.
        ways: yields refinements of this candidate; None if it is final.
    """

    legs: tuple[Callable[[], _Path], ...]
    is_apart: bool = False
    is_last_first: bool = False
    ways: Callable[[], Iterator[_LegsPath]] | None = None

    def together(self, first: int, *others: int) -> int:
        """Return the cost of all legs; extents may be symbolic."""
        last = sum(others)
        if not self.is_apart:
            return first + last
        return first if first > last else last


def across(
    source: Layout, destination: Layout, shape: tuple[int, ...], itemsize: int, find: _Steps
) -> tuple[Step, ...]:
    """Return the steps from one mesh to another; `find` plans each part of the path."""

    def steps(before: Layout, after: Layout, shape: tuple[int, ...]) -> _Path:
        return find(before, after, shape, itemsize) if before != after else ()

    common = on_common_mesh(source, destination, shape)
    if common is not None:
        before = _as_it_is(source, common[0]) if source != common[0] else ()
        after = _as_it_is(common[1], destination) if common[1] != destination else ()
        return (*before, *steps(*common, shape), *after)
    if source.blocked or destination.blocked:
        return through_blocks(source, destination, shape, itemsize, lambda a, b: steps(a, b, shape))
    staying = kept_terms(source, destination)
    if destination.reduce_ops and len(staying) < len(destination.reduce_ops):
        ways = (
            _LegsPath((partial(steps, source, x, shape), partial(steps, x, destination, shape)))
            for x in _before_terms(destination, shape)
        )
        return _cheapest(ways, source, destination, shape, itemsize)
    if len(staying) < len(source.reduce_ops):
        candidates = _reducing(source, destination, shape, steps)
    elif not staying and not is_lacking(source, destination, shape):
        return _as_it_is(source, destination)
    else:
        candidates = _moved(source, destination, shape, steps)
    return _cheapest(candidates, source, destination, shape, itemsize)


def _before_terms(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Yield layouts that become a Partial without communication: whole, or split along its axes.

    A shard becomes a Partial term by padding with the neutral element.
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
    ways: Iterable[_LegsPath],
    source: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    itemsize: int,
) -> _Path:
    """Return the steps of the cheapest candidate; ties go to the first."""
    if is_timed(source, destination, shape):
        return _soonest(ways, lambda step: _known_time(step, shape, itemsize))
    if not is_special(source, destination, shape):
        return _soonest(ways, lambda step: step_cost(step, shape))
    planned = ((way, way.legs[0](), way.legs[1]()) for way in ways)
    _, first, last = min(planned, key=lambda way: _cost(way[0], way[1], way[2], shape))
    return (*first, *last)


def _cost(way: _LegsPath, first: _Path, last: _Path, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the cost and the number of the steps; extents may be symbolic."""
    costs = [sum(step_cost(step, shape) for step in leg) for leg in (first, last)]
    return way.together(costs[0], costs[1]), len(first) + len(last)


class _Planned(NamedTuple):
    """A candidate, some of whose legs are planned; entries of the frontier compare in this order.

    Attributes:
        total: a lower bound of the cost.
        work: a lower bound of the sum of all legs.
        steps: the number of steps, as far as it is known.
        place: the place of the candidate among all; refinements follow their candidate.
        legs: the number of planned legs.
        way: the candidate.
        spent: the costs of the planned legs, 0 of the others.
        paths: the steps of each leg; () of those that are not planned.
    """

    total: int
    work: int
    steps: int
    place: tuple[int, ...]
    legs: int
    way: _LegsPath
    spent: tuple[int, ...]
    paths: tuple[_Path, ...]

    @staticmethod
    def none_of(way: _LegsPath, place: tuple[int, ...], least: int = 0) -> _Planned:
        """Return a candidate before any leg is planned; `least` is a lower bound of its cost."""
        legs = len(way.legs)
        return _Planned(least, 0, 0, place, 0, way, (0,) * legs, ((),) * legs)

    def one_more(self, cost: Callable[[Step], int]) -> _Planned:
        """Return the candidate with one more leg planned."""
        way, spent, paths = self.way, [*self.spent], [*self.paths]
        leg = len(paths) - 1 - self.legs if way.is_last_first else self.legs
        paths[leg] = way.legs[leg]()
        spent[leg] = sum(map(cost, paths[leg]))
        return self._replace(
            total=way.together(*spent),
            work=sum(spent),
            steps=sum(map(len, paths)),
            legs=self.legs + 1,
            spent=tuple(spent),
            paths=tuple(paths),
        )


def _soonest(ways: Iterable[_LegsPath], cost: Callable[[Step], int]) -> _Path:
    """Return the steps of the cheapest candidate.

    Ties go to the least sum of all legs, then to the fewest steps, then to the first candidate. The
    search is best-first: plan one more leg of the candidate with the least bound, until it is
    complete.
    """
    frontier = [_Planned.none_of(way, (n,)) for n, way in enumerate(ways)]
    if len(frontier) == 1 and frontier[0].way.ways is None:
        return tuple([step for find in frontier[0].way.legs for step in find()])
    heapq.heapify(frontier)
    while True:
        planned = heapq.heappop(frontier)
        if planned.way.ways is not None:
            for n, way in enumerate(planned.way.ways()):
                refined = _Planned.none_of(way, (*planned.place, n), planned.total)
                heapq.heappush(frontier, refined)
        elif planned.legs == len(planned.paths):
            return tuple([step for path in planned.paths for step in path])
        else:
            heapq.heappush(frontier, planned.one_more(cost))


#: each leg is a part of several candidates
_known_time = lru_cache(maxsize=1024)(step_time)


def _as_it_is(source: Layout, destination: Layout) -> _Path:
    return (Local(kind="slice", source=source, destination=destination),)


def _moved(
    source: Layout, destination: Layout, shape: tuple[int, ...], steps: _Find
) -> Iterator[_LegsPath]:
    """Yield candidates without a reduction: one communication; with known hosts also finer splits.

    A host may receive one copy, one part per rank, and gather it; or the sending host may split its
    copy first.
    """
    yield _LegsPath((tuple, partial(_moving, source, destination, shape)))
    if is_timed(source, destination, shape):
        for split in _finer(destination, shape):
            legs = partial(_moving, source, split, shape), partial(steps, split, destination, shape)
            yield _LegsPath(legs)


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


def _alone(step: Step) -> _Path:
    return (step,)


def _only_split(layout: Layout) -> tuple[str, int] | None:
    """Return (axis, dim) if one axis of all ranks splits one dim; else None."""
    if len(layout.splits) != 1 or len(layout.splits[0][1]) != 1:
        return None
    dim, (axis,) = layout.splits[0]
    return (axis, dim) if layout.mesh.axis_size(axis) == layout.mesh.size else None


def _reducing(
    source: Layout, destination: Layout, shape: tuple[int, ...], steps: _Find
) -> Iterator[_LegsPath]:
    """Yield candidates that reduce a Partial and move it to another mesh, preferred ones first."""
    staying = dict(kept_terms(source, destination))
    axes = tuple(a for a in source.partial_axes if a not in staying)
    ops = {source.reduce_ops[a] for a in axes if a in source.reduce_ops}
    root = _to_one_rank(source, destination, ops)
    if root is not None:
        first, at_root = root
        yield _LegsPath(
            (partial(_alone, first), partial(steps, at_root, destination, shape)), is_apart=True
        )
    is_apart = have_no_rank_in_common(source.mesh, destination.mesh)
    is_known = is_apart and not staying and is_timed(source, destination, shape)
    for done in splits_of(source, axes, shape):
        reduced = partial(steps, source, done, shape)
        legs = reduced, partial(steps, done, destination, shape)
        onward = partial(_on_from, reduced, done, destination, shape, steps)
        ways = onward if is_known else None
        yield _LegsPath(legs, is_apart, is_last_first=True, ways=ways)
    if len(ops) == 1 and not staying and source.stream is None:
        (op,) = ops
        for split in splits_of(destination, (), shape):
            at_once = Communication(
                kind="ReduceExchange", source=source, destination=split, reduce_op=op
            )
            legs = partial(_alone, at_once), partial(steps, split, destination, shape)
            yield _LegsPath(legs)


def _on_from(
    first: Callable[[], _Path],
    done: Layout,
    destination: Layout,
    shape: tuple[int, ...],
    steps: _Find,
) -> Iterator[_LegsPath]:
    """Yield candidates that reduce the terms first, one for each choice of the later steps."""
    for way in _moved(done, destination, shape, steps):
        yield way._replace(legs=(first, *way.legs), is_apart=True, is_last_first=True)


def _to_one_rank(
    source: Layout, destination: Layout, ops: set[str]
) -> tuple[Communication, Layout] | None:
    """Return the Reduce to a root that sends on, and its layout, if one Partial spans the mesh."""
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


@lru_cache(maxsize=256)
def _finer(layout: Layout, shape: tuple[int, ...]) -> tuple[Layout, ...]:
    return tuple(_splits_finer(layout, shape))


def _splits_finer(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Yield splits of one dim over some replicated axes."""
    free = [a for a, p in layout.by_axis().items() if isinstance(p, Replicate)]
    free = [a for a in free if layout.mesh.axis_size(a) > 1]
    room = layout.local_shape(shape)
    for dim in free_dims(layout, shape):
        for n in range(1, len(free) + 1):
            for axes in combinations(free, n):
                parts = math.prod(map(layout.mesh.axis_size, axes))
                if room[dim] >= parts:
                    yield placed(layout, axes, Shard(dim))
