"""The price of a strategy: the bytes that ranks receive where layouts change.

A value is read from whichever copy of it costs least, those that other expressions need included.
Steps are planned for those strategies alone that a quick lower bound does not rule out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Value
from mdfuse.layouts.layout import Layout, Replicate, Shard
from mdfuse.layouts.recv_volume import has_few_rows
from mdfuse.passes.axis_strategy import Choice, Operand, Result
from mdfuse.reshard import Carriers, arrivals, cost, elements_received
from mdfuse.reshard.lower_bounds import least_cost

#: On meshes of up to this many ranks, parts of few rows are counted rank by rank.
_FEW_RANKS = 16


#: How axes are used, the layouts in which operands are read, and those of results as computed.
Way = tuple[Mapping[str, Choice], Mapping[str, Layout], Sequence[Layout]]


def cheapest(ways: Sequence[Way], operands: Sequence[Operand], results: Sequence[Result]) -> int:
    """Return the position of the strategy with the least price; of equal ones, the first.

    Args:
        ways: the strategies.
        operands: the tensors that are read, and where they are.
        results: what is computed, and where it must be.
    """
    values = [*(x.value for x in operands), *(x.value for x in results)]
    if any(is_symbolic(v.shape) for v in values):  # a comparison decides for extents: few of them
        prices = [_price(way, operands, results, _moved) for way in ways]
        return min(range(len(ways)), key=prices.__getitem__)
    leasts = [_price(way, operands, results, _at_least) for way in ways]
    best = math.inf, 0
    for least, n in sorted(zip(leasts, range(len(ways)), strict=True)):
        if (least, n) > best:
            break
        best = min(best, (_price(ways[n], operands, results, _moved), n))
    return best[1]


def _price(
    way: Way,
    operands: Sequence[Operand],
    results: Sequence[Result],
    moved: Callable[[Layout, Layout, Value], Any],
) -> int:
    """Return what the busiest rank receives, in units of 1 / `UNIT` of a byte."""
    axes, wanted, yielded = way
    total: Any = 0
    for o in operands:
        if o.layout is not None:
            goal = wanted[o.value.name]
            there = [o.layout, *[c for c in (*o.copies, *o.viewed) if c.mesh == goal.mesh]]
            arriving = [moved(layout, goal, o.value) for layout in there]
            if o.copies and goal not in there:
                arriving.append(arriving[0] - _spared(o, there, goal, moved))
            total = total + min(arriving, key=_most)
    for layout, r in zip(yielded, results, strict=True):
        goal = r.law or _settled(layout, axes, r, operands)
        total = total + moved(layout, goal, r.value)
        # An expansion travels as its operand, which may as well; sets in loops take it whole.
        total = total + bool(r.value.expanded and layout != goal)
    return _most(total)


def _spared(
    o: Operand, there: Sequence[Layout], goal: Layout, moved: Callable[[Layout, Layout, Value], Any]
) -> int:
    """Return what copies for other expressions take less where one is there in the goal, too."""
    total = 0
    for copy in o.copies:
        others = [_most(_moved(x, copy, o.value)) for x in there if x is not copy]
        if copy.mesh == goal.mesh and copy != o.layout:
            total += max(0, min(others) - _most(moved(goal, copy, o.value)))
    return total


def _most(price: Any) -> int:
    """Return the largest of what ranks receive; a number stands for all of them."""
    return int(price.max()) if isinstance(price, np.ndarray) else price


def _settled(
    layout: Layout, way: Mapping[str, Choice], result: Result, operands: Sequence[Operand]
) -> Layout:
    """Return the layout of a result that no law places: a Partial is reduced, or passed on.

    A gradient is read where its operand is: its sum is scattered as that is split.
    """
    if not layout.partial_axes:
        return layout
    like = next((o.layout for o in operands if o.layout and o.labels == result.labels), None)
    for axis in layout.partial_axes:
        if not isinstance(way.get(axis), str):
            there = like.placement(axis) if like is not None and like.mesh == layout.mesh else None
            layout = layout.with_placement(axis, there if isinstance(there, Shard) else Replicate())
    return layout


def move_cost(value: Value, before: Layout, after: Layout) -> int:
    """Return what the busiest rank receives in a change of layout, in 1 / `UNIT` of a byte."""
    shape, (old, new) = value.travels(before, after)
    return cost(old, new, shape) * value.dtype.itemsize


def brought_cost(values: Mapping[str, Value], name: str, to: Layout) -> int:
    """Return what the busiest rank receives where a value is brought into a layout."""
    value = values[name]
    return move_cost(value, value.placed, to)


def received_bytes(value: Value, before: Layout, after: Layout, carriers: Carriers = ()) -> float:
    """Return the bytes that the busiest rank receives in a change of layout.

    An expanded dim counts as one element, since it travels as one.
    """
    shape, (old, new) = value.travels(before, after)
    return elements_received(old, new, shape, carriers) * value.dtype.itemsize


def _moved(before: Layout, after: Layout, value: Value) -> Any:
    """Return what a rank receives in a change of layout; an array, where ranks differ."""
    if before == after:
        return 0
    shape, (old, new) = value.travels(before, after)
    if new.mesh.size <= _FEW_RANKS and any(has_few_rows(x, shape) for x in (old, new)):
        return _arrivals(old, new, shape) * value.dtype.itemsize
    return move_cost(value, before, after)


def _at_least(before: Layout, after: Layout, value: Value) -> int:
    """Return a lower bound of what the busiest rank receives in a change of layout."""
    if before == after:
        return 0
    shape, (old, new) = value.travels(before, after)
    return least_cost(old, new, shape) * value.dtype.itemsize


_arrivals = lru_cache(maxsize=4096)(arrivals)
