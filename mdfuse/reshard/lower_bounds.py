"""Lower bounds on the data that a change of layout moves, for any sequence of steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdfuse.layouts.boxes import boxes_of
from mdfuse.layouts.layout import Layout, Partial
from mdfuse.layouts.recv_volume import UNIT, has_few_rows, is_special, part_size


@dataclass(frozen=True)
class Moved:
    """Elements received from other ranks: by the busiest rank, and in all."""

    worst: float
    total: float


def bound(source: Layout, goal: Layout, shape: tuple[int, ...]) -> Moved:
    """Return a lower bound of the data that any algorithm moves; it need not be attainable.

    An element that a rank needs arrives there at least once, unless the rank holds it and nothing
    is reduced. The first rank with the sum of L terms received L messages, or L - 1 if it holds a
    term; each further rank that needs the sum receives one more. The average receive volume is the
    total over the number of ranks.
    """
    kept_axes = [a for a in source.partial_axes if a in goal.partial_axes]
    ranks = sorted({*source.mesh.ranks, *goal.mesh.ranks})
    cuts, volume = cut_in_cells(source, goal, shape)
    terms = math.prod(source.mesh.axis_size(a) for a in source.partial_axes if a not in kept_axes)
    least, total = 0.0, 0.0
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        groups[coordinates(source, rank, kept_axes)].append(rank)
    for members in groups.values():
        have = {r: cells_of(source, shape, cuts, r) for r in members}
        need = {r: cells_of(goal, shape, cuts, r) for r in members}
        for r in members:
            lacks = need[r] & ~have[r] if terms == 1 else need[r]
            least = max(least, float((volume * lacks).sum()))
            total += float((volume * lacks).sum())
        if terms > 1:
            wanted = np.any([*need.values()], axis=0)
            at_holder = np.any([need[r] & have[r] for r in members], axis=0)
            total += float((volume * ((terms - 1) * wanted - at_holder)).sum())
    return Moved(max(least, total / len(ranks)), total)


def least_cost(source: Layout, goal: Layout, shape: tuple[int, ...]) -> int:
    """Return a quick lower bound of `cost`: `UNIT` times elements; 0 where it would take long.

    The first rank has the largest parts. Where nothing is reduced, it lacks what its part grows by;
    else it receives its part, and ranks receive the average of `bound`.

    >>> from mdfuse import DeviceMesh, Layout, Partial
    >>> mesh = DeviceMesh.arange(tp=4)
    >>> least_cost(Layout(mesh, {"tp": Partial()}), Layout(mesh), (8,)) / UNIT
    12.0
    """
    is_one = source.mesh == goal.mesh and not (source.stream or goal.stream)
    if not is_one or goal.reaches or is_special(source, goal, shape):
        return 0
    if has_few_rows(source, shape) or has_few_rows(goal, shape):
        return 0  # costs of some steps count parts as even
    if source.blocked or goal.blocked or source.varying_axes or goal.varying_axes:
        return 0
    size_of, staying, terms = source.mesh.axis_size, 1, 1
    for axis, before, after in zip(
        source.mesh.axes, source.placements, goal.placements, strict=True
    ):
        if isinstance(before, Partial):
            n = size_of(axis)
            staying, terms = (staying * n, terms) if before == after else (staying, terms * n)
        elif isinstance(after, Partial):
            return 0
    need = part_size(goal, shape)
    if terms == 1:
        return UNIT * max(0, need - part_size(source, shape))
    ranks = source.mesh.size // staying
    wanted = ranks // math.prod([size_of(a) for _, axes in goal.splits for a in axes])
    return UNIT * max(need, math.prod(shape) * (terms + wanted - 2) // ranks)


def cut_in_cells(
    source: Layout, goal: Layout, shape: tuple[int, ...]
) -> tuple[list[list[int]], np.ndarray[Any, Any]]:
    """Return the boundaries of both layouts' parts, and the elements of the cells between."""
    cuts = [
        sorted(
            {0, extent, *(e for x in (source, goal) for _, i in x.chunks_of(d, extent) for e in i)}
        )
        for d, extent in enumerate(shape)
    ]
    sizes = [np.diff(c) for c in cuts]
    volume = math.prod((np.ix_(*sizes) if sizes else ()), start=np.ones((1,) * len(sizes), int))
    return cuts, volume


def coordinates(layout: Layout, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """Return a rank's coordinates along some axes; none outside of the mesh."""
    coordinate = layout.mesh.coordinate(rank)
    return tuple(coordinate[layout.mesh.axis_index(a)] for a in axes) if coordinate else ()


def cells_of(
    layout: Layout, shape: tuple[int, ...], cuts: list[list[int]], rank: int
) -> np.ndarray[Any, Any]:
    """Return a mask of the cells between the cuts that a rank has."""
    grid = tuple(len(c) - 1 for c in cuts)
    cells = np.zeros(grid, bool)
    if rank in layout.mesh:
        for box, _ in boxes_of(layout.rows(shape, rank)):
            where = zip(box, cuts, strict=True)
            cells[tuple(slice(c.index(a), c.index(b)) for (a, b), c in where)] = True
    return cells
