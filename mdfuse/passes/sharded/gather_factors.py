"""Gather the operands of an elementwise op where that takes fewer bytes than its result.

    %w: f32[64,8,1] (tp=S0)
    %dy: f32[64,8,16] (tp=S0) = expand(%d)          # one row for eight
    %z: f32[64,8,16] (tp=S0) = mul(%dy, %w)         # all readers need it whole
->
    %z: f32[64,8,16] (tp=R) = mul(%dy, %w)          # of both operands, gathered

A gather commutes with an elementwise op, and operands that are repeated are smaller than the
result. An operand that others read whole as well is gathered for them anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.dims import pointwise
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Replicate, Shard
from mdfuse.passes.propagate_layouts import anew
from mdfuse.passes.strategy import choose_here
from mdfuse.reshard import cost

name = "gather_factors"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion in which such results are computed whole."""
    done: set[str] = set()
    while True:
        whole = {x: to for e in fusion.exprs for x, to in _whole(fusion, e) if x not in done}
        if not whole:
            return fusion
        done |= whole.keys()
        fusion = anew(fusion.with_layouts(whole), whole.keys())


def _whole(fusion: Fusion, expr: Expr) -> Iterator[tuple[str, Layout]]:
    """Yield the result of an elementwise op, and its layout, where its operands are gathered."""
    if TABLE[expr.op].rule is not pointwise or len(expr.reads) < 2:
        return
    out, operands = fusion.values[expr.outputs[0]], [fusion.values[x] for x in expr.reads]
    if out.layout is None or out.is_law or out.stream is not None or out.name in fusion.outputs:
        return
    if not all(x.layout is not None and x.layout.mesh == out.layout.mesh for x in operands):
        return
    if not any(isinstance(p, Shard) for p in out.layout.placements):
        return
    if any(is_symbolic(x.shape) for x in (out, *operands)):
        return  # each comparison would be a guard
    if all(x.bytes >= out.bytes for x in operands):
        return
    for axis in out.layout.mesh.axes:
        if not isinstance(out.layout.placement(axis), Shard):
            continue
        is_asked = _all_need_whole(fusion, out.name, axis)
        if is_asked and _gathered(fusion, out.name, axis) > _price(fusion, expr, axis):
            yield out.name, out.layout.with_placement(axis, Replicate())
            return  # the next turn looks at other axes


def _all_need_whole(fusion: Fusion, value: str, axis: str) -> bool:
    readers = fusion.consumers[value]
    return bool(readers) and all(_reads_whole(fusion, r, value, axis) for r in readers)


def _reads_whole(fusion: Fusion, reader: Expr, value: str, axis: str) -> bool:
    if reader.op == "set":
        wanted = fusion.layout(reader.output)
    else:
        strategy = choose_here(reader, fusion.values)
        assert strategy is not None
        wanted = strategy.wanted[value]
    is_here = wanted.mesh == fusion.layout(value).mesh
    return is_here and wanted.placement(axis) == Replicate()


def _price(fusion: Fusion, expr: Expr, axis: str) -> int:
    """Return the bytes of gathering the operands that nobody else gathers."""
    others = {x: [r for r in fusion.consumers[x] if r is not expr] for x in expr.reads}
    return sum(
        _gathered(fusion, x, axis)
        for x, readers in others.items()
        if not any(_reads_whole(fusion, r, x, axis) for r in readers)
    )


def _gathered(fusion: Fusion, value: str, axis: str) -> int:
    of, layout = fusion.values[value], fusion.layout(value)
    shape, (before, after) = of.travels(layout, layout.with_placement(axis, Replicate()))
    return cost(before, after, shape) * of.dtype.itemsize
