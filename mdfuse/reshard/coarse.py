"""Tensors of few rows for each rank: parts are padded, and some ranks get more than others.

A search adds up what arrives at the worst rank of each step; here it counts that the worst rank of
one step may be the best of another. So two searches and what they find without padding are weighed
rank by rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mdfuse.layouts.lacks import UNIT, is_special
from mdfuse.reshard.costs import Move, Node
from mdfuse.reshard.search import Search

_Way = list[tuple[Node, Move]]


def cheapest(search: Search) -> _Way:
    """Return the moves of the way that brings least to the worst rank; of several, least in all."""
    found = search.path()
    if search.is_timed or not search.ops or not _is_coarse(search, found):
        return found
    ways = [found, _unpadded(search, found)]
    best = min(ways, key=lambda way: _arriving(search, way))
    if _arriving(search, best)[0] * 64 > search.least_arriving(search.start) * 65:
        other = replace(search, left={}, is_worst_alone=True).path()
        best = min(best, other, _unpadded(search, other), key=lambda way: _arriving(search, way))
    return best


def _is_coarse(search: Search, way: _Way) -> bool:
    """Whether padding is over 1/64 of a tensor on the way."""
    if is_special(search.source, search.goal, search.shape):
        return False
    nodes = [here for here, _ in way] + [search.end]
    return any(search.is_coarse(d, axes) for node in nodes for d, axes in enumerate(node.splits))


def _unpadded(search: Search, way: _Way) -> _Way:
    """Return the same way with exchanges for collectives whose parts are padded."""
    if len({*search.ops.values()}) > 1:
        return way
    return [(here, _as_exchange(move) if search.pads(move, here) else move) for here, move in way]


def _as_exchange(move: Move) -> Move:
    kind = "ReduceExchange" if move.kind == "ReduceScatter" else "Exchange"
    return Move(kind, move.after)


def _arriving(search: Search, way: _Way) -> tuple[int, int]:
    """Return what arrives at the worst rank, and at all of them."""
    each: Any = np.zeros(search.sizes, int)
    for here, move in way:
        if move.kind in ("Exchange", "ReduceExchange"):
            copies = search.count(here.partial) // search.count(move.after.partial) - 1
            each = each + UNIT * search.missing(here, move.after, copies)
        else:
            each = each + search.cost(move, here)
    return int(each.max()), int(each.sum())
