"""Pairs of layouts, what a reshard between them must move at least, and what its steps move.

Nothing here asks the planner what it believes: a bound follows from the boxes that ranks hold and
need, and what steps move is counted post by post, rank by rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import torch

from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.communication import Communication
from mdfuse.layouts.boxes import box_size
from mdfuse.layouts.kinds import POINT_TO_POINT
from mdfuse.layouts.layout import Placement
from mdfuse.reshard import Step, with_type

Pair = tuple[Layout, Layout]


def layouts(mesh: DeviceMesh, ndim: int, ops: Sequence[str] = ()) -> Iterator[Layout]:
    """Yield every layout of a tensor on a mesh, every order of axes that split one dim included."""
    kinds: list[Placement] = [Replicate(), *map(Shard, range(ndim)), *map(Partial, ops)]
    for chosen in product(kinds, repeat=mesh.ndim):
        splits: dict[int, list[str]] = defaultdict(list)
        for axis, placement in zip(mesh.axes, chosen, strict=True):
            if isinstance(placement, Shard):
                splits[placement.dim].append(axis)
        placements = dict(zip(mesh.axes, chosen, strict=True))
        for order in product(*(permutations(axes) for axes in splits.values())):
            yield Layout(mesh, placements, dict(zip(splits, order, strict=True)))


def pairs(mesh: DeviceMesh, ndim: int) -> Iterator[Pair]:
    """Yield every pair of different layouts whose destination makes no Partial of its own."""
    every = list(layouts(mesh, ndim, ("sum",)))
    for source, goal in product(every, repeat=2):
        if source != goal and {*goal.partial_axes} <= {*source.partial_axes}:
            yield source, goal


@dataclass(frozen=True)
class Moved:
    """Elements that arrive from other ranks: at the rank that receives most, and in all."""

    worst: float
    total: float


def bound(source: Layout, goal: Layout, shape: tuple[int, ...]) -> Moved:
    """Return a lower bound of what any algorithm moves; it need not be attainable.

    An element that a rank needs arrives there at least once, unless the rank holds it and nothing
    is reduced. Of L terms to be reduced, the first rank that has the sum took L messages, or L - 1
    where it holds a term; each other rank that needs it takes one more. On average over all ranks
    arrives the total over their number.
    """
    kept = [a for a in source.partial_axes if a in goal.partial_axes]
    ranks = sorted({*source.mesh.ranks, *goal.mesh.ranks})
    cuts = [
        sorted(
            {0, extent, *(e for x in (source, goal) for _, i in x.chunks_of(d, extent) for e in i)}
        )
        for d, extent in enumerate(shape)
    ]
    sizes = [np.diff(c) for c in cuts]
    volume = math.prod((np.ix_(*sizes) if sizes else ()), start=np.ones((1,) * len(sizes), int))
    terms = math.prod(source.mesh.axis_size(a) for a in source.partial_axes if a not in kept)
    least, total = 0.0, 0.0
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        groups[_at(source, rank, kept)].append(rank)
    for members in groups.values():
        have = {r: _cells(source, shape, cuts, r) for r in members}
        need = {r: _cells(goal, shape, cuts, r) for r in members}
        for r in members:
            lacks = need[r] & ~have[r] if terms == 1 else need[r]
            least = max(least, float((volume * lacks).sum()))
            total += float((volume * lacks).sum())
        if terms > 1:
            wanted = np.any([*need.values()], axis=0)
            at_holder = np.any([need[r] & have[r] for r in members], axis=0)
            total += float((volume * ((terms - 1) * wanted - at_holder)).sum())
    return Moved(max(least, total / len(ranks)), total)


def _at(layout: Layout, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    coordinate = layout.mesh.coordinate(rank)
    return tuple(coordinate[layout.mesh.axis_index(a)] for a in axes) if coordinate else ()


def _cells(layout: Layout, shape: tuple[int, ...], cuts: list[list[int]], rank: int) -> np.ndarray:
    """Return which cells between the cuts a rank has."""
    grid = tuple(len(c) - 1 for c in cuts)
    cells = np.zeros(grid, bool)
    if rank in layout.mesh:
        box = layout.intervals(shape, rank)
        where = zip(box, cuts, strict=True)
        cells[tuple(slice(c.index(a), c.index(b)) for (a, b), c in where)] = True
    return cells


def posts(path: Sequence[Step], shape: tuple[int, ...]) -> list[Communication]:
    """Return the communications among some steps, for bytes of this shape."""
    typed = (with_type(step, shape, torch.uint8) for step in path)
    return [step for step in typed if isinstance(step, Communication)]


def moved(found: Sequence[Communication], ranks: Sequence[int]) -> Moved:
    """Return how many bytes the posts bring to the worst rank, and to all."""
    each = [sum(c.bytes_received(r) for c in found) for r in ranks]
    return Moved(max(each), sum(each))


def sender_spread(found: Sequence[Communication]) -> float | None:
    """Return what the busiest sender of point-to-point posts sends, over an even spread.

    None where there are none. Even is what all ranks that hold the value would send each.
    """
    worst = None
    for c in found:
        if c.kind in POINT_TO_POINT:
            sent = [sum(map(box_size, c.part(r).sends)) for r in c.source.mesh.ranks]
            if any(sent):
                worst = max(worst or 0.0, max(sent) * len(sent) / sum(sent))
    return worst
