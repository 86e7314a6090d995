"""Tensors of few rows per rank: collectives pad parts, and receive volumes differ between ranks.

A search adds up the largest receive volume of each step, although the busiest rank of one step may
be the least busy one of another. This module compares several paths rank by rank: those of the
searches, and the same paths with exchanges for padded collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mdfuse.layouts.dim_parts import length
from mdfuse.layouts.recv_volume import UNIT, is_special
from mdfuse.reshard.nodes import LayoutNode, Move
from mdfuse.reshard.search import Search

_Way = list[tuple[LayoutNode, Move]]


def cheapest(search: Search) -> _Way:
    """Return the path with the least volume at the busiest rank; ties go to the least total."""
    path = search.path()
    is_fixed = search.is_timed or search.turns or not search.ops
    if is_fixed or not _is_coarse(search, path):
        return path
    ways = [path, _unpadded(search, path)]
    best = min(ways, key=lambda way: _arriving(search, way))
    _, most, _ = _arriving(search, best)
    if most * 64 > search.least_arriving(search.start) * 65:
        other = replace(search, left={}, leasts={}, is_worst_alone=True).path()
        ways = [best, other, _unpadded(search, other), *_scattered_first(search, most)]
        best = min(ways, key=lambda way: _arriving(search, way))
    return best


def _scattered_first(search: Search, most: int) -> Iterator[_Way]:
    """Yield paths that reduce terms into shards of dims, and exchange these.

    Args:
        search: the search.
        most: the largest receive volume of a known path.
    """

    def onward(node: LayoutNode, way: _Way, each: Any) -> Iterator[_Way]:
        if np.max(each) >= most:
            return
        if not node.partial:
            yield [*way, (node, Move("Exchange", search.end))]
        for a in node.partial:
            for move in search.along(node, a):
                if move.kind == "ReduceScatter":
                    ((_, taken),) = _unpadded(search, [(node, move)])
                    arrived = each + _arriving_by(search, node, taken)
                    yield from onward(move.after, [*way, (node, taken)], arrived)

    if not search.goal_ops and len(search.ops) <= 2:  # of three there are many
        yield from onward(search.start, [], 0)


def _is_coarse(search: Search, way: _Way) -> bool:
    """Return whether padding is over 1/64 of a tensor on the way."""
    if is_special(search.source, search.goal, search.shape):
        return False
    nodes = [before for before, _ in way] + [search.end]
    return any(search.is_coarse(d, axes) for node in nodes for d, axes in enumerate(node.splits))


def _unpadded(search: Search, way: _Way) -> _Way:
    """Return the same path with exchanges for collectives that pad parts."""
    if len({*search.ops.values()}) > 1:
        return way
    return [(node, _as_exchange(move) if search.pads(move, node) else move) for node, move in way]


def _as_exchange(move: Move) -> Move:
    kind = "ReduceExchange" if move.kind == "ReduceScatter" else "Exchange"
    return Move(kind, move.after)


def _arriving(search: Search, way: _Way) -> tuple[int, int, int]:
    """Return the number of axes of several backends that exchanges span, and the volume.

    The volume is that of the busiest rank, then that of all ranks.
    """
    each: Any = np.zeros(search.sizes, int)
    for node, move in way:
        each = each + search.later(_arriving_by(search, node, move), move, node)
    spans = sum(search.spanned(node, move) for node, move in way)
    return spans, int(each.max()), int(each.sum())


def _arriving_by(search: Search, node: LayoutNode, move: Move) -> Any:
    """Return each rank's receive volume in a move: an array that broadcasts over the mesh."""
    if move.kind in ("Exchange", "ReduceExchange"):
        copies = search.count(node.partial) // search.count(move.after.partial) - 1
        return UNIT * search.missing(node, move.after, copies)
    if move.kind not in ("Allreduce", "Allgather", "ReduceScatter"):
        return search.cost(move, node)
    whole, n = move.after if move.kind == "Allgather" else node, search.count(move.axes)
    block: Any = 1
    for dim, axes in enumerate(whole.splits):
        rows = length(search.of_dims[dim].rows(axes))
        block = block * (-(-rows // n) if dim == move.dim else rows)
    return UNIT * (-(-2 * block * (n - 1) // n) if move.dim is None else block * (n - 1))
