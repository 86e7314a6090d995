"""Take the bias out of a `linear` over a split dim: it is added once, after the reduction.

    %y: f32[8,16] (tp=R) = linear(%h, %w, %b)       # k split by tp
->
    %y.partial: f32[8,16] (tp=P(sum)) = linear(%h, %w)
    %y: f32[8,16] (tp=R) = add(%y.partial, %b)
"""

from __future__ import annotations

from dataclasses import replace

from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.layouts.layout import Layout
from mdfuse.passes.strategy import choose

name = "decompose"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with the bias of each linear that yields Partial added by itself."""
    values = dict(fusion.values)
    exprs: list[Expr] = []
    for expr in fusion.exprs:
        partial = _without_bias(expr, values)
        if partial is None:
            exprs.append(expr)
            continue
        product, layout = partial
        out = values[expr.output]
        values[product.output] = Value(
            name=product.output,
            shape=out.shape,
            dtype=out.dtype,
            order=out.order,
            layout=layout,
            stream=out.stream if out.layout and out.layout.mesh == layout.mesh else None,
            source=out.source,
        )
        bias = expr.inputs[2]
        exprs.append(product)
        exprs.append(replace(expr, op="add", inputs=(product.output, bias), attrs=()))
    return replace(fusion, values=values, exprs=tuple(exprs))


def _without_bias(expr: Expr, values: dict[str, Value]) -> tuple[Expr, Layout] | None:
    """Return the linear without its bias, and its layout, if that is Partial; else None."""
    if expr.op != "linear" or len(expr.inputs) < 3 or expr.inputs[2] is None:
        return None
    product = replace(expr, inputs=expr.inputs[:2])
    strategy = choose(product, values, values[expr.output].layout)
    if strategy is None or not strategy.result.partial_axes:
        return None
    output = fresh_name(values, f"{expr.output}.partial")
    return replace(product, outputs=(output,)), strategy.result
