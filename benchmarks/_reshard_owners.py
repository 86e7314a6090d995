"""The least that comes to the worst rank if one rank reduces each element, whichever it is.

That rank gets all terms of the element, and sends the sum on. So ranks may reduce pieces of any
shape and size, as no layout has them, and share the work as evenly as it goes. Prices of what comes
to ranks, which add up to 1, bound it from below: the worst rank gets no less than the average by
prices, for which each element goes where it is cheapest (the dual of a linear program). Prices
that say most are found step by step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mdfuse import Layout
from mdfuse.reshard.lower_bounds import cells_of, cut_in_cells

_ROUNDS = 300


def worst(source: Layout, goal: Layout, shape: tuple[int, ...]) -> float:
    """Return the elements that come to the worst rank at least; none of the terms may stay."""
    terms = math.prod(map(source.mesh.axis_size, source.partial_axes))
    cuts, volume = cut_in_cells(source, goal, shape)
    have, need = (
        np.array([cells_of(x, shape, cuts, r).reshape(-1) for r in source.mesh.ranks])
        for x in (source, goal)
    )
    elements = volume.reshape(-1) * need.any(0)
    # More than the one copy that a rank needs comes to it of what it reduces: but its own term.
    extra = (terms - have.astype(int) - need) * elements
    return _least(extra, (need * elements).sum(1))


def _least(volumes: Any, needed: Any) -> float:
    """Return the most that prices say."""
    least, say = 0.0, np.zeros(len(needed))
    for n in range(_ROUNDS):
        prices = np.exp(say - say.max())
        prices = prices / prices.sum()
        priced = prices[:, None] * volumes
        cheapest = priced.min(0)
        least = max(least, float(prices @ needed + cheapest.sum()))
        is_taken = priced <= cheapest + 1e-12
        comes = needed + (is_taken / is_taken.sum(0) * volumes).sum(1)
        say = say + 4 / math.sqrt(1 + n) * (comes / comes.max() - 1)
    return least
