"""Receive volumes of an exchange: the elements that ranks get from others, largest and average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.boxes import ManyRows, box_size, boxes_of, intersect
from mdfuse.layouts.dim_parts import length, shared
from mdfuse.layouts.exchange import Exchange, kept_terms
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh

#: Costs are integers in units of 1 / UNIT of an element, so that they compare exactly; UNIT is
#: divisible by most axis sizes.
UNIT = 8192 * 3 * 3 * 5 * 7

#: Up to this many ranks, check senders one by one.
_FEW = 64

#: Axis -> the coordinate of each rank: arrays that broadcast with each other.
_Coordinates = dict[str, Any]


def lacks(
    source: Layout, destination: Layout, shape: tuple[int, ...], copies: int = 0
) -> tuple[int, int]:
    """Return the largest receive volume of a rank in elements, and `UNIT` times the average.

    A rank outside of the source's mesh receives its whole part. Array operations cover all ranks:
    thousands of ranks take some tens of microseconds. For symbolic extents, and for chunks, the
    maximum stands for the average.

    Args:
        source: the layout before.
        destination: the layout afterwards.
        shape: global extents.
        copies: the number of additional copies of its whole part that each rank receives.
    """
    if is_special(source, destination, shape):
        worst = max((0, *_one_by_one(source, destination, shape, copies)))
        return worst, UNIT * worst
    if not destination.reaches and have_no_rank_in_common(source.mesh, destination.mesh):
        return arriving_from_others(destination, shape, copies + 1)
    return most_and_mean(_lack(source, destination, shape, copies))


def arriving_from_others(layout: Layout, shape: tuple[int, ...], copies: int) -> tuple[int, int]:
    """Return `lacks` for ranks that hold nothing; the first rank's part is the largest.

    Args:
        layout: the layout afterwards.
        shape: global extents, numbers.
        copies: the number of copies of its part that each rank receives.
    """
    mesh = layout.mesh
    parts = math.prod([mesh.axis_size(a) for _, axes in layout.splits for a in axes])
    total = UNIT * copies * math.prod(shape) * (mesh.size // parts)
    return copies * part_size(layout, shape), total // mesh.size


@lru_cache(maxsize=256)
def have_no_rank_in_common(one: DeviceMesh, other: DeviceMesh) -> bool:
    """Return whether two meshes are disjoint.

    >>> have_no_rank_in_common(DeviceMesh([0, 1]), DeviceMesh([2, 1]))
    False
    """
    return not np.isin(one.array, other.array).any()


def most_and_mean(counts: Any) -> tuple[int, int]:
    """Return the largest of some element counts, and `UNIT` times their average."""
    if type(counts) is int:
        return counts, UNIT * counts
    numbers = np.asarray(counts)
    return int(numbers.max()), UNIT * int(numbers.sum()) // numbers.size


def most(numbers: Any) -> int:
    """Return the largest of some numbers; one number stands for equal ones."""
    return numbers if type(numbers) is int else int(numbers.max())


def _lack(source: Layout, destination: Layout, shape: tuple[int, ...], copies: int) -> Any:
    """Return the receive volume of each rank: an array that broadcasts over the mesh."""
    need, have, is_holder = _coordinates(source.mesh, destination.mesh)
    if not np.any(is_holder) and not is_symbolic(shape):
        return part_sizes(destination, shape) * (copies + 1)
    needed: Any = copies + 1
    held: Any = is_holder
    for dim, extent in enumerate(shape):
        rows = rows_at(destination, dim, extent, need)
        needed = needed * length(rows)
        held = held * shared(rows, rows_at(source, dim, extent, have))
    if source.mesh != destination.mesh:
        for a, b in kept_terms(source, destination):  # another term does not count as held
            held = held * (have[a] == need[b])
    return needed - held


def taking_part(exchange: Exchange) -> tuple[int, ...]:
    """Return the ranks that send or receive, in the order of the source's mesh, then the other's.

    Where a run chooses the extents, all ranks of both meshes.
    """
    source, destination, shape = exchange.source, exchange.destination, exchange.source.shape
    both = (source.layout, destination.layout)
    meshes = source.mesh, destination.mesh
    if is_special(*both, shape):
        return (*meshes[0].ranks, *(r for r in meshes[1].ranks if r not in meshes[0]))
    if 0 in shape:
        return ()
    if meshes[0].lost:
        members = dict.fromkeys((*meshes[0].ranks, *meshes[1].ranks))
        return tuple(r for r in members if _has_message(exchange, r))
    ranks, goal = (mesh.array for mesh in meshes)
    lack = np.asarray(_lack(*both, shape, source.count(exchange.reduced) - 1) > 0)
    grid = meshes[1].shape if meshes[0] == meshes[1] else (meshes[1].size,)
    takes, known = (np.zeros(max(m.last_rank for m in meshes) + 1, bool) for _ in meshes)
    takes[goal[np.broadcast_to(lack, grid).reshape(-1)]] = True
    unknown = ranks[~takes[ranks]]
    if len(unknown) > _FEW:
        by_host = exchange.by_host
        unknown = np.unique(exchange.senders()) if by_host else ranks[_is_sending(exchange)]
        unknown = unknown[~takes[unknown]]
    if len(unknown) <= _FEW:  # a turn may have no elements
        unknown = np.array([r for r in unknown.tolist() if any(exchange.sent(r))], int)
    takes[unknown] = True
    known[ranks] = True
    every = np.concatenate((ranks, goal[~known[goal]]))
    return tuple(every[takes[every]].tolist())


def _has_message(exchange: Exchange, rank: int) -> bool:
    """Return whether a rank sends to another one, or receives from one."""
    return any(exchange.sent(rank)) or any(r != rank for r, *_ in exchange.received(rank))


def _is_sending(exchange: Exchange) -> Any:
    """Return a mask of the source ranks that have a turn to send, in the order of the mesh."""
    source, destination = exchange.source, exchange.destination
    at, met = every_coordinate(source.mesh), []
    for dim, extent in enumerate(source.shape):
        met.append(destination.parts[dim].met(rows_at(source.layout, dim, extent, at)))
    return np.broadcast_to(exchange.pattern.has_turn(at, met), (source.mesh.size,))


@lru_cache(maxsize=256)
def every_coordinate(mesh: DeviceMesh) -> _Coordinates:
    """Return the coordinates of all ranks, in row-major order."""
    return dict(zip(mesh.axes, np.unravel_index(np.arange(mesh.size), mesh.shape), strict=True))


def is_special(source: Layout, destination: Layout, shape: tuple[int, ...]) -> bool:
    """Return whether extents are symbolic, or a layout is of chunks: arrays do not apply then."""
    for x in (source, destination):
        if x.stream is not None and x.stream.index is not None:
            return True
    return is_symbolic(shape)


def _one_by_one(
    source: Layout, destination: Layout, shape: tuple[int, ...], copies: int = 0
) -> Iterator[int]:
    """Yield the receive volume of each rank, in elements."""
    for rank in _different(source, destination):
        need = [box for box, _ in boxes_of(destination.rows(shape, rank))]
        has_term = rank in source.mesh and _has_term(source, destination, rank)
        has = [box for box, _ in boxes_of(source.rows(shape, rank))] if has_term else []
        both = (intersect(a, b) for a in need for b in has)
        held = sum(box_size(box) for box in both if box is not None)
        yield (copies + 1) * sum(map(box_size, need)) - held


def _has_term(source: Layout, destination: Layout, rank: int) -> bool:
    """Return whether a rank of both meshes holds the term that it needs."""
    have, need = (
        dict(zip(x.mesh.axes, x.mesh.coordinate(rank) or (), strict=True))
        for x in (source, destination)
    )
    return all(have[a] == need[b] for a, b in kept_terms(source, destination))


def _different(source: Layout, destination: Layout) -> Iterable[int]:
    """Return destination ranks that cover all combinations of held and needed parts."""
    mesh = destination.mesh
    if source.mesh != mesh:
        return mesh
    split = {a for x in (source, destination) for _, axes in x.splits for a in axes}
    ranges = (range(n if a in split else 1) for a, n in zip(mesh.axes, mesh.shape, strict=True))
    return map(mesh.rank_at, product(*ranges))


def is_lacking(source: Layout, destination: Layout, shape: tuple[int, ...]) -> bool:
    """Return whether some rank receives elements."""
    if source.mesh != destination.mesh and not all(r in source.mesh for r in destination.mesh):
        return True
    if is_special(source, destination, shape):
        return any(_one_by_one(source, destination, shape))
    return lacks(source, destination, shape)[0] > 0


def rows_at(layout: Layout, dim: int, extent: int, at: _Coordinates) -> ManyRows:
    """Return (start, stop) of each rank's part in each block: arrays."""
    return layout.parts(dim, extent).at([at[a] for a in layout.split_axes(dim)])


@lru_cache(maxsize=256)
def _coordinates(source: DeviceMesh, destination: DeviceMesh) -> tuple[Any, Any, Any]:
    """Return the destination ranks' coordinates in both meshes, and a mask of source membership.

    Ranks outside of the source get the coordinates of its first rank; the mask excludes them.
    """
    if source == destination:
        grid = np.ogrid[tuple(slice(n) for n in source.shape)]
        both = dict(zip(source.axes, grid, strict=True))
        return both, both, 1
    ranks = destination.array
    place = np.zeros(max(source.last_rank, destination.last_rank) + 1, int)
    inside = np.zeros(len(place), int)
    place[source.array] = np.arange(source.size)
    inside[source.array] = 1
    need = np.unravel_index(np.arange(destination.size), destination.shape)
    have = np.unravel_index(place[ranks], source.shape)
    pairs = (dict(zip(m.axes, at, strict=True)) for m, at in ((destination, need), (source, have)))
    return (*pairs, inside[ranks])


def arriving(kind: str, n: int, before: int, after: int) -> int:
    """Return `UNIT` times the elements that a rank receives in a collective, with padding.

    Args:
        kind: a collective along axes of a mesh.
        n: ranks per team.
        before: elements of the largest part that is read.
        after: elements of the largest part that is written.
    """
    if kind == "Allgather":
        return UNIT * before * (n - 1)
    if kind == "ReduceScatter":
        return UNIT * after * (n - 1)
    return UNIT * -(-(2 if kind == "Allreduce" else 1) * before * (n - 1) // n)


def weighed(worst: int, average: int) -> int:
    """Return the cost of an exchange from its largest and its average receive volume.

    >>> weighed(10, 10), weighed(10, 5)
    (10, 9)
    """
    return (4 * worst + average) // 5


def dearer(cost: int) -> int:
    """Return the cost of a ReduceExchange: collectives that cost 1/64 more are preferred."""
    return cost * 65 // 64


def part_sizes(layout: Layout, shape: tuple[int, ...]) -> Any:
    """Return the elements of each rank's part, in row-major order; extents are numbers."""
    sizes: Any = 1
    for dim, extent in enumerate(shape):
        rows = layout.parts(dim, extent).equal
        if rows is None:
            rows = length(rows_at(layout, dim, extent, every_coordinate(layout.mesh)))
        sizes = sizes * rows
    return np.full(layout.mesh.size, sizes)


def has_few_rows(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Return whether equal parts would pad a dim by over 1/64 of it; extents are numbers."""
    size_of = layout.mesh.axis_size
    return not is_symbolic(shape) and any(
        -shape[d] % math.prod(map(size_of, axes)) * 64 > shape[d] for d, axes in layout.splits
    )


def part_size(layout: Layout, shape: tuple[int, ...]) -> int:
    """Return the elements of the largest part, the first rank's."""
    if is_symbolic(shape):
        return math.prod(layout.local_shape(shape))
    return math.prod([layout.parts(d, n).first for d, n in enumerate(shape)])
