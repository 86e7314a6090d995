"""Split inferred values of which every reader wants the same part, or takes it for few bytes.

    %y: f32[8,16] (tp=R) = add(%p, %b)              # %p is (tp=P(sum))
    %z: f32[8,16] (tp=S0)! = set(%y)
->
    %y: f32[8,16] (tp=S0) = add(%p, %b)             # %p is reduce-scattered, not all-reduced
    %z: f32[8,16] (tp=S0)! = set(%y)

A reader that adds the value up would take it whole, since it is, but may add up parts:

    %c: f32[16] (tp=R) = sum(%y, dims=[0])          # %y is (tp=R), all-reduced
->
    %c: f32[16] (tp=P(sum)) = sum(%y, dims=[0])     # %y is (tp=S0): 16 terms are all-reduced

This is done where the terms take fewer bytes than what is spared before the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.layouts.layout import Layout, Replicate, Shard
from mdfuse.passes.strategy import Strategy, choose_here, choose_laid, moved, strategy_of

name = "reduce_scatter_creation"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with these values split, from the last to the first."""
    values = dict(fusion.values)
    # What the user wants to lie as another value would no longer do so.
    likes = (v.like for v in values.values() if v.like is not None)
    fixed = {like.of for like in likes if like.past is None and not like.but}
    fixed.update(fusion.outputs)
    results = [(expr, name) for expr in reversed(fusion.exprs) for name in expr.outputs]
    for expr, name in results:
        out = values[name]
        if not out.is_tensor or out.is_law or name in fixed:
            continue
        wanted = set()
        for reader in fusion.consumers[name]:
            strategy = _strategy(reader, values)
            wanted.add(strategy.wanted[name])
        layout = out.placed
        goal = wanted.pop() if len(wanted) == 1 else _in_parts(fusion, expr, out, wanted, values)
        if goal is None:
            continue
        if layout.partial_axes:
            layout = _without_terms(expr, out, layout, goal, values)
            if layout is not out.layout:
                out = values[name] = replace(out, layout=layout)
            goal = _beside_terms(layout, goal)
        if not _is_slice(layout, goal):
            continue
        if goal.partial_axes and not _yields(expr, out, goal, values):
            continue
        values[name] = replace(out, layout=_pushed(expr, out, goal, values))
    return replace(fusion, values=values)


def _in_parts(
    fusion: Fusion, expr: Expr, out: Value, wanted: set[Layout], values: Mapping[str, Value]
) -> Layout | None:
    """Return the part that some readers want, where all others take it, and that is fewer bytes."""
    layout = out.placed
    goals = wanted - {layout}
    goal = goals.pop() if len(goals) == 1 and layout in wanted else None
    if goal is None or goal.reaches or layout.partial_axes or not _is_slice(layout, goal):
        return None
    if any(is_symbolic(values[x].shape) for x in (out.name, *expr.reads) if values[x].is_tensor):
        return None  # each comparison would be a guard
    split, brought = {**values, out.name: replace(out, layout=goal)}, 0
    for reader in fusion.consumers[out.name]:
        if _strategy(reader, values).wanted[out.name] == layout:
            strategy = None if reader.op == "set" else choose_here(reader, split)
            if strategy is None or strategy.wanted[out.name] != goal or len(reader.outputs) > 1:
                return None
            brought += moved(strategy, reader, split, values[reader.outputs[0]].placed)
    return goal if brought < _spared(fusion, expr, out, goal, values) else None


def _spared(
    fusion: Fusion, expr: Expr, out: Value, goal: Layout, values: Mapping[str, Value]
) -> int:
    """Return what arrives less where a result, and what it alone is made of, is computed split."""
    asked, total = [(expr, out, goal)], 0
    for maker, result, to in asked:  # which grows
        split = choose_laid(maker, values, {result.name: to})
        if maker.op == "set" or len(maker.outputs) > 1 or split is None or result.layout is None:
            continue
        total += moved(_strategy(maker, values), maker, values, result.layout)
        total -= moved(split, maker, values, to)
        for x, there in split.wanted.items():
            value, producer = values[x], fusion.producers.get(x)
            is_alone = len(fusion.consumers[x]) == 1 and x not in fusion.returned
            if producer is not None and is_alone and not value.is_law and value.layout is not None:
                asked += [(producer, value, there)] if _is_slice(value.layout, there) else []
    return total


def _strategy(expr: Expr, values: Mapping[str, Value]) -> Strategy:
    if expr.op == "set":  # a set reads its operand as it is; the change of layout is its own
        (operand,) = expr.reads
        layout, source = values[expr.output].layout, values[operand].layout
        assert layout is not None and source is not None
        wanted = layout if source.mesh == layout.mesh else source
        return Strategy(wanted={operand: wanted}, results=(layout,))
    return strategy_of(expr, values)


def _pushed(expr: Expr, out: Value, goal: Layout, values: Mapping[str, Value]) -> Layout:
    """Return the layout of a result that all readers read in the goal layout.

    Windows that overlap are cut, or received, where they are read: of the parts that are made.
    Rows that move are cut out of the whole, which no rank then lacks.
    """
    if not goal.reaches:
        return goal
    assert out.layout is not None
    if expr.op == "set" or any(reach.is_move for _, reach in goal.reaches):
        return out.layout
    goal = goal.without_reaches
    strategy = choose_laid(expr, values, {out.name: goal})
    assert strategy is not None
    inferred = strategy.results[expr.outputs.index(out.name)]
    return goal if inferred.partial_axes or inferred.mesh != goal.mesh else inferred


def _without_terms(
    expr: Expr, out: Value, layout: Layout, goal: Layout, values: Mapping[str, Value]
) -> Layout:
    """Return a result's layout in parts, not terms, where to read operands for that takes less."""
    for axis in layout.partial_axes if layout.mesh == goal.mesh else ():
        if isinstance(to := goal.placement(axis), Shard):
            split = layout.with_placement(axis, to)
            if split.split_axes(to.dim) == (axis,) and _yields(expr, out, split, values):
                layout = split
    return layout


def _yields(expr: Expr, out: Value, goal: Layout, values: Mapping[str, Value]) -> bool:
    """Return whether an expression yields terms in a layout, which nobody then has to make."""
    strategy = choose_laid(expr, values, {out.name: goal})
    return strategy is not None and strategy.results[expr.outputs.index(out.name)] == goal


def _beside_terms(layout: Layout, goal: Layout) -> Layout:
    """Return the goal before terms are reduced, where they may be reduced inside of its parts."""
    for axis in layout.partial_axes if layout.mesh == goal.mesh else ():
        to = goal.placement(axis)
        if isinstance(to, Shard):
            order = goal.split_axes(to.dim)
            if any(a not in layout.partial_axes for a in order[order.index(axis) :]):
                return goal
        goal = goal.with_placement(axis, layout.placement(axis))
    return goal


def _is_slice(layout: Layout, goal: Layout) -> bool:
    """Return whether the goal differs from the layout only by splitting what was whole."""
    if layout.mesh != goal.mesh or layout == goal:
        return False
    pairs = zip(layout.placements, goal.placements, strict=True)
    return all(p == q or (isinstance(p, Replicate) and isinstance(q, Shard)) for p, q in pairs)
