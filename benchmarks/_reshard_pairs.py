"""Pairs of layouts, what a reshard between them must move at least, and what its steps move.

Nothing here asks the planner what it believes: a bound follows from the boxes that ranks hold and
need, and what steps move is counted post by post, rank by rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations, product

import torch

from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.communication import Communication
from mdfuse.errors import LayoutError
from mdfuse.layouts.boxes import box_size
from mdfuse.layouts.kinds import POINT_TO_POINT
from mdfuse.layouts.layout import Placement
from mdfuse.reshard import Step, with_type
from mdfuse.reshard.lower_bounds import Moved, bound

__all__ = ["Moved", "blocked_pairs", "bound", "moved", "pairs", "posts", "sender_spread"]

Pair = tuple[Layout, Layout]


def layouts(
    mesh: DeviceMesh, ndim: int, ops: Sequence[str] = (), others: Sequence[Placement] = ()
) -> Iterator[Layout]:
    """Yield every layout of a tensor on a mesh, every order of axes that split one dim included.

    Args:
        mesh: the mesh.
        ndim: how many dims the tensor has.
        ops: by which reduce ops it may be Partial.
        others: placements besides; where they do not go with others, there is no such layout.
    """
    kinds: list[Placement] = [Replicate(), *map(Shard, range(ndim)), *map(Partial, ops), *others]
    for chosen in product(kinds, repeat=mesh.ndim):
        splits: dict[int, list[str]] = defaultdict(list)
        for axis, placement in zip(mesh.axes, chosen, strict=True):
            if isinstance(placement, Shard):
                splits[placement.dim].append(axis)
        placements = dict(zip(mesh.axes, chosen, strict=True))
        for order in product(*(permutations(axes) for axes in splits.values())):
            try:
                yield Layout(mesh, placements, dict(zip(splits, order, strict=True)))
            except LayoutError:
                if not others:
                    raise


def pairs(mesh: DeviceMesh, ndim: int) -> Iterator[Pair]:
    """Yield every pair of different layouts whose destination makes no Partial of its own."""
    every = list(layouts(mesh, ndim, ("sum",)))
    for source, goal in product(every, repeat=2):
        if source != goal and {*goal.partial_axes} <= {*source.partial_axes}:
            yield source, goal


def blocked_pairs(mesh: DeviceMesh, shape: tuple[int, ...]) -> Iterator[Pair]:
    """Yield the same where dim 0 of one of them, or of both, is in three unequal blocks.

    As a fused projection of grouped-query attention has them: one half, one and another quarter.
    """
    n = shape[0]
    blocks = Shard(0, (n // 2, n // 4, n - n // 2 - n // 4))
    every = list(layouts(mesh, len(shape), ("sum",), (blocks,)))
    for source, goal in product(every, repeat=2):
        is_blocked = source.blocked or goal.blocked
        if is_blocked and source != goal and {*goal.partial_axes} <= {*source.partial_axes}:
            yield source, goal


def posts(path: Sequence[Step], shape: tuple[int, ...]) -> list[Communication]:
    """Return the communications among some steps, for bytes of this shape."""
    typed = (with_type(step, shape, torch.uint8) for step in path)
    return [step for step in typed if isinstance(step, Communication)]


def moved(steps: Sequence[Communication], ranks: Sequence[int]) -> Moved:
    """Return how many bytes the posts bring to the worst rank, and to all."""
    each = [sum(c.bytes_received(r) for c in steps) for r in ranks]
    return Moved(max(each), sum(each))


def sender_spread(steps: Sequence[Communication]) -> float | None:
    """Return what the busiest sender of point-to-point posts sends, over an even spread.

    None where there are none. Even is what all ranks that hold the value would send each.
    """
    worst = None
    for c in steps:
        if c.kind in POINT_TO_POINT:
            sent = [sum(map(box_size, c.part(r).sends)) for r in c.source.mesh.ranks]
            if any(sent):
                worst = max(worst or 0.0, max(sent) * len(sent) / sum(sent))
    return worst
