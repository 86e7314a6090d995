"""Move the parts of an op over a split dim that run once behind the reduction.

    %y: f32[8,16] (tp=R) = linear(%h, %w, %b)       # k split by tp
    %m: bf16[8,1] (tp=R) = mean(%y, dims=[1], keepdim=True)         # of a split dim
->
    %y.partial: f32[8,16] (tp=P(sum)) = linear(%h, %w)
    %y: f32[8,16] (tp=R) = add(%y.partial, %b)
    %m.sum: f32[8,1] (tp=P(sum)) = sum(%y, dims=[1], keepdim=True, dtype=f32)
    %m.div: f32[8,1] (tp=R) = div(%m.sum, 16)
    %m: bf16[8,1] (tp=R) = cast(%m.div, dtype=bf16)

A bias is added to the sum. A mean is the sum by the number of elements: a quotient of each term
would be rounded once per rank. Sums, products and means of 16 bits are made and reduced in f32, and
rounded once, as torch does on one device: a term may overflow where the sum does not. Only terms in
bf16, which do not overflow, stay in it: ranks hold numbers that are rounded already. So do terms of
groups of a dim (`sum_rows`), which may be as large as the dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mdfuse.ir.dims import reduced_dims
from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.layouts.layout import Layout
from mdfuse.passes.rewriting import Maker, Rule, laid_out
from mdfuse.passes.sharded import sum_rows
from mdfuse.passes.strategy import choose

name = "decompose"

#: dtype -> the one in which torch adds up numbers of it, which it rounds once.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with biases, counts and roundings behind the reductions."""
    fusion = _biases(fusion)
    return laid_out(fusion, ends(fusion, _is_reduced))


# -- reductions ----------------------------------------------------------------------------------


def ends(
    fusion: Fusion, is_asked: Callable[[Fusion, Expr], bool], *, is_settled: bool = False
) -> dict[str, Rule]:
    """Return the rules that take the ends of some reductions apart.

    Args:
        fusion: with layouts.
        is_asked: whether the terms of a reduction are joined later, by ranks or by microbatches.
        is_settled: layouts stay, since all sets are there: Partials are rounded term by term.
    """
    asked = (e for e in fusion.exprs if _has_end(fusion, e) and is_asked(fusion, e))
    return {e.output: partial(_end, is_settled=is_settled) for e in asked}


def _has_end(fusion: Fusion, expr: Expr) -> bool:
    is_narrow = expr.op in ("sum", "prod") and fusion.values[expr.output].dtype in _WIDE
    return expr.op == "mean" or is_narrow


def _is_reduced(fusion: Fusion, expr: Expr) -> bool:
    """Return whether ranks hold terms of a reduction that is to be whole."""
    out = fusion.values[expr.output]
    law = out.layout if out.is_law else None
    strategy = choose(expr, fusion.values, law)
    if strategy is None:
        return False
    law_axes = law.partial_axes if law is not None and law.mesh == strategy.result.mesh else ()
    reduced = {*strategy.result.partial_axes} - {*law_axes}
    x = fusion.values[expr.reads[0]]
    if expr.op == "sum" and x.dtype == out.dtype == torch.bfloat16:  # as wide as its own sum
        is_made = not reduced <= {*strategy.wanted[x.name].partial_axes}
        return is_made and not sum_rows.adds_groups(fusion, expr)
    return bool(reduced)


def _end(maker: Maker, by: Expr, is_settled: bool) -> None:
    """Append a reduction in a wide enough dtype, and its end."""
    out = maker.values[by.output]
    is_fixed = is_settled or out.is_law
    x, wide = by.reads[0], _WIDE.get(out.dtype)
    op = "sum" if by.op == "mean" else by.op
    how: dict[str, Any] = {k: v for k, v in by.attrs if k in ("dims", "keepdim")}
    if maker.values[x].dtype != out.dtype:
        x = maker.op(by, "cast", x, dtype=out.dtype)
    if wide is not None or op == "prod":
        how["dtype"] = wide or out.dtype
    total = maker.op(by, op, x, **how)
    law = out.layout if out.is_law else None
    strategy = choose(maker.exprs[-1], maker.values, law)
    if strategy is not None:
        is_here = out.layout is not None and out.layout.mesh == strategy.result.mesh
        stream = out.stream if is_here else None
        ended = replace(maker.values[total], layout=strategy.result, stream=stream)
        maker.values[total] = ended
    if law is not None and strategy is not None and strategy.result != law:
        total = maker.op(by, "set", total)
        maker.values[total] = replace(maker.values[total], layout=law, stream=out.stream)
    if by.op == "mean":
        total = maker.op(by, "div", total, _count(maker, by), last=wide is None)
    if by.op == "mean" and wide is not None and (is_fixed or not _is_term(out)):
        maker.values[total] = replace(maker.values[total], layout=out.layout, stream=out.stream)
    if wide is not None:
        rounds = "round_terms" if is_fixed and _is_term(out) else "cast"
        maker.op(by, rounds, total, last=True, dtype=out.dtype)


def _is_term(value: Value) -> bool:
    return value.layout is not None and bool(value.layout.partial_axes)


def _count(maker: Maker, mean: Expr) -> int:
    """Return the number of elements per mean."""
    shape = maker.values[mean.reads[0]].shape
    return math.prod(shape[d] for d in reduced_dims(mean.kwargs.get("dims"), len(shape)))


# -- biases --------------------------------------------------------------------------------------


def _biases(fusion: Fusion) -> Fusion:
    """Return the fusion with the bias of each linear that yields Partial added by itself."""
    values, ended = dict(fusion.values), set[str]()
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
        ended.add(expr.output)
    for name, value in values.items() if ended else ():  # copies that the linear read with its bias
        if value.copies:
            copies = tuple([c for c in value.copies if c[0] not in ended])
            values[name] = replace(value, copies=copies)
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
