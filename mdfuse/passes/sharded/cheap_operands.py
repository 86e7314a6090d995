"""Compute a result as its readers need it, where that takes fewer bytes of its operands.

Whole, or split along another dim, if it is elementwise, and operands that are repeated are smaller:

    %w: f32[64,8,1] (tp=S0)
    %dy: f32[64,8,16] (tp=S0) = expand(%d)          # one row for eight
    %z: f32[64,8,16] (tp=S0) = mul(%dy, %w)         # all readers need it whole
->
    %z: f32[64,8,16] (tp=R) = mul(%dy, %w)          # of both operands, gathered

An operand that others read so as well is brought there for them anyway.

As terms, instead of whole, if it is added to a Partial:

    %q: f32[8,16] (tp=P(sum)) = matmul(%dq, %a)
    %k: f32[8,16] (tp=R) = matmul(%dk, %b)          # %b is (tp=S0), and would be gathered
    %x: f32[8,16] (tp=R) = add(%q, %k)
->
    %k: f32[8,16] (tp=P(sum)) = matmul(%dk, %b)
    %x: f32[8,16] (tp=P(sum)) = add(%q, %k)

So are sums of terms and of other values, where they are added to further terms:

    %a: f32[8,16] (tp=R) = add(%x, %p)              # %p is (tp=P(sum)), %x is not
    %y: f32[8,16] (tp=R) = add(%a, %q)              # and so is %q: it is all-reduced, too
->
    %a: f32[8,16] (tp=P(sum)) = add(%x, %p)         # %x is a term of one rank
    %y: f32[8,16] (tp=P(sum)) = add(%a, %q)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.dims import pointwise
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Partial, Placement, Shard, commute
from mdfuse.passes.prices import brought_cost
from mdfuse.passes.propagate_layouts import anew
from mdfuse.passes.strategy import choose, choose_here, choose_laid, moved, read_layouts

name = "cheap_operands"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion in which such results are computed as they are read."""
    chosen: dict[str, Layout] = {}
    while read := {x: to for e in fusion.exprs for x, to in _as_read(fusion, e) if x not in chosen}:
        chosen |= read
        fusion = anew(fusion.with_layouts(chosen), chosen.keys())
    return fusion


def with_terms(fusion: Fusion) -> Fusion:
    """Return the fusion in which results that are added to a Partial are terms."""
    while terms := {x: to for e in fusion.exprs for x, to in _terms(fusion, e)} or _sums(fusion):
        fusion = anew(fusion.with_layouts(terms), terms.keys())
    return fusion


def _is_free(fusion: Fusion, value: str) -> bool:
    """Return whether the layout of a value may change: users neither see nor state it."""
    of = fusion.values[value]
    return not of.is_law and of.stream is None and value not in fusion.returned


# -- as read ---------------------------------------------------------------------------------------


def _as_read(fusion: Fusion, expr: Expr) -> Iterator[tuple[str, Layout]]:
    """Yield the result of an elementwise op in the layout that all read, where operands move so."""
    is_expansion = expr.op == "expand"
    if not is_expansion and (TABLE[expr.op].rule is not pointwise or len(expr.reads) < 2):
        return
    out, operands = fusion.values[expr.outputs[0]], [fusion.values[x] for x in expr.reads]
    if out.layout is None or not _is_free(fusion, out.name):
        return
    if not all(x.layout is not None and x.layout.mesh == out.layout.mesh for x in operands):
        return
    if not any(isinstance(p, Shard) for p in out.layout.placements):
        return
    if any(is_symbolic(x.shape) for x in (out, *operands)):
        return  # each comparison would be a guard
    if not is_expansion and all(x.bytes >= out.bytes for x in operands):
        return
    for axis in out.layout.mesh.axes:
        if not isinstance(out.layout.placement(axis), Shard):
            continue
        goal = _wanted_by_all(fusion, out.name, axis)
        # One element of an expansion would travel, which is the operand; loops have no form for it.
        if goal is None:
            continue
        price = brought_cost(fusion.values, out.name, goal) + is_expansion
        if price > _price(fusion, expr, goal):
            yield out.name, goal
            return


def _wanted_by_all(fusion: Fusion, value: str, axis: str) -> Layout | None:
    """Return the layout of a value in which all read it along an axis; None where that is its."""
    wanted = {_read_along(fusion, r, value, axis) for r in fusion.consumers[value]}
    to, layout = wanted.pop() if len(wanted) == 1 else None, fusion.layout(value)
    if to is None or to == layout.placement(axis) or isinstance(to, Partial):
        return None
    if isinstance(to, Shard) and layout.split_axes(to.dim):
        return None  # the order of axes in one dim is its readers' to choose
    return layout.with_placement(axis, to)


def _read_along(fusion: Fusion, reader: Expr, value: str, axis: str) -> Placement | None:
    wanted = read_layouts(reader, fusion)[value]
    is_here = wanted.mesh == fusion.layout(value).mesh and not wanted.reaches
    return wanted.placement(axis) if is_here else None


def _price(fusion: Fusion, expr: Expr, goal: Layout) -> int:
    """Return what arrives where operands that nobody else reads so are brought to a goal."""
    strategy = choose_laid(expr, fusion.values, {expr.outputs[0]: goal})
    assert strategy is not None
    others = {x: [r for r in fusion.consumers[x] if r is not expr] for x in expr.reads}
    return sum(
        brought_cost(fusion.values, x, strategy.wanted[x])
        for x, readers in others.items()
        if not any(read_layouts(r, fusion)[x] == strategy.wanted[x] for r in readers)
    )


# -- as terms --------------------------------------------------------------------------------------


def _terms(fusion: Fusion, expr: Expr) -> Iterator[tuple[str, Layout]]:
    """Yield what a sum adds to a Partial, and its layout as terms, where that takes no more bytes.

    Each is read by the sum alone, which is then Partial itself.
    """
    if not _is_sum(fusion, expr) or not all(_is_alone(fusion, x) for x in expr.reads):
        return
    for axis in fusion.layout(expr.reads[0]).mesh.axes:
        others = [x for x in expr.reads if fusion.layout(x).placement(axis) != Partial()]
        if not 0 < len(others) < len(expr.reads):
            continue
        if not all(commute(("sum", *fusion.layout(x).reduce_ops.values())) for x in others):
            continue
        goals = {x: fusion.layout(x).with_placement(axis, Partial()) for x in others}
        if all(_may_be_term(fusion, x, axis, goal) for x, goal in goals.items()):
            yield from goals.items()
            return  # another axis looks at the layouts that these become


def _is_sum(fusion: Fusion, expr: Expr) -> bool:
    """Return whether an expression adds tensors up, all of one mesh."""
    if TABLE[expr.op].partial != "sum" or len(expr.reads) != len(expr.inputs):
        return False
    operands = [fusion.values[x] for x in expr.reads]
    meshes = {x.layout.mesh if x.layout is not None else None for x in operands}
    return all(x.is_tensor for x in operands) and len(meshes) == 1


def _sums(fusion: Fusion) -> dict[str, Layout]:
    """Return sums that add terms to other values, as terms, where further terms are added behind.

    What each adds up is then reduced once, with all that is added to it.
    """
    #: (sum, axis) -> what it adds up of terms
    of_terms: dict[tuple[str, str], list[str]] = {}
    goals: dict[str, Layout] = {}
    for expr in fusion.exprs:
        if not _is_sum(fusion, expr):
            continue
        layout = fusion.layout(expr.output)
        if layout.mesh != fusion.layout(expr.reads[0]).mesh:
            continue
        for axis in layout.mesh.axes:
            under = [
                x
                for x in expr.reads
                if _is_alone(fusion, x)
                and (fusion.layout(x).placement(axis) == Partial() or (x, axis) in of_terms)
            ]
            if len(under) > 1:
                goals = {**_as_terms(fusion, axis, under, of_terms), **goals}
            is_open = (
                under and layout.placement(axis) != Partial() and _is_free(fusion, expr.output)
            )
            if is_open and commute(("sum", *layout.reduce_ops.values())):
                of_terms[expr.output, axis] = under
    return goals


def _as_terms(
    fusion: Fusion, axis: str, under: list[str], of_terms: dict[tuple[str, str], list[str]]
) -> dict[str, Layout]:
    """Return the sums below a sum, from the last to the first, with their layouts as terms."""
    goals, asked = dict[str, Layout](), [*under]
    for x in asked:  # which grows
        if (x, axis) in of_terms:
            goals[x] = fusion.layout(x).with_placement(axis, Partial())
            asked += of_terms[x, axis]
    values = fusion.with_layouts(goals).values
    for x, goal in goals.items():
        strategy = choose(fusion.producers[x], values, goal)
        if strategy is None or strategy.result != goal:
            return {}
    return goals


def _is_alone(fusion: Fusion, value: str) -> bool:
    return len(fusion.consumers[value]) == 1 and value not in fusion.returned


def _may_be_term(fusion: Fusion, value: str, axis: str, goal: Layout) -> bool:
    """Return whether ranks may hold terms of an inferred value for no more bytes than the whole."""
    out, producer = fusion.values[value], fusion.producers.get(value)
    layout = fusion.layout(value)
    if producer is None or producer.op == "set" or len(producer.outputs) > 1:
        return False
    if TABLE[producer.op].partial == "quotient":  # terms by 0 are infinite, of any sign
        return False
    if not _is_free(fusion, value) or isinstance(layout.placement(axis), Partial):
        return False
    as_term = choose(producer, {**fusion.values, value: replace(out, layout=None)}, goal)
    as_whole = choose_here(producer, fusion.values)
    if as_term is None or as_whole is None or as_term.result != goal:
        return False
    return moved(as_term, producer, fusion.values, goal) <= moved(
        as_whole, producer, fusion.values, layout
    )
