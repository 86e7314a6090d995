"""The least that any three steps between layouts of one mesh bring to the worst rank.

All ways are tried: two layouts on the way, whichever, each of three steps an exchange that brings
every rank just what it lacks (of each term, where it reduces), or an all-reduce. So it is what a
planner can reach whose ranks hold parts of `torch.chunk` in between, for a tensor too small to be
split evenly. The bound (`_reshard_pairs.bound`) lets ranks share single elements.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from _reshard_pairs import layouts

from mdfuse import DeviceMesh, Layout, Replicate

#: more than anything costs
_NEVER = 1e15


class Least:
    """The least for all pairs of layouts of one mesh, of tensors of one shape."""

    def __init__(self, mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
        self.mesh, self.shape = mesh, shape
        self.every = list(layouts(mesh, len(shape), ("sum",)))
        self.place = {layout: i for i, layout in enumerate(self.every)}
        self.steps = self._steps()

    def worst(self, source: Layout, goal: Layout) -> float:
        """Return the elements that arrive at the worst rank, at least."""
        first, last = self.steps[self.place[source]], self.steps[:, self.place[goal]]
        ways = [np.flatnonzero(x[:, 0] < _NEVER) for x in (first, last)]
        between = self.steps[np.ix_(*ways)]
        each = first[ways[0]][:, None] + between + last[ways[1]][None]
        return float(each.max(-1).min())

    def _steps(self) -> Any:
        """Return what one step from one layout to another brings to each rank."""
        n, ranks = len(self.every), self.mesh.ranks
        rows = np.array(
            [[[x.rows(self.shape, r)[d][0] for r in ranks] for d in range(len(self.shape))]
             for x in self.every]
        )  # fmt: skip
        start, stop = rows[..., 0], rows[..., 1]
        need = np.prod(stop - start, 1)
        both = np.minimum(stop[:, None], stop[None]) - np.maximum(start[:, None], start[None])
        shared = np.prod(np.maximum(both, 0), 2)
        steps = np.full((n, n, len(ranks)), _NEVER)
        for i, source in enumerate(self.every):
            for j, goal in enumerate(self.every):
                terms = {*source.partial_axes} - {*goal.partial_axes}
                if not {*goal.partial_axes} <= {*source.partial_axes}:
                    continue
                copies = math.prod(map(self.mesh.axis_size, terms))
                steps[i, j] = copies * need[j] - shared[i, j]
                if goal == _whole(source, terms):
                    ring = 2 * (copies - 1) * int(need[i].max()) / copies
                    steps[i, j] = np.minimum(steps[i, j], math.ceil(ring))
        return steps


def _whole(layout: Layout, axes: set[str]) -> Layout:
    for axis in axes:
        layout = layout.with_placement(axis, Replicate())
    return layout
