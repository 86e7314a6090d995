"""Reduce sums of narrow floats in a wider dtype (`Options.reduce_dtype`).

    %z: bf16[8,16] (tp=S0) = set(%y)                    # %y is (tp=P(sum))
->
    %y.wide: f32[8,16] (tp=P(sum)) = widen(%y, dtype=f32)
    %z.wide: f32[8,16] (tp=S0) = set(%y.wide)
    %z: bf16[8,16] (tp=S0) = cast(%z.wide, dtype=bf16)

Every set that reduces is such a one, whoever asked for it and along whichever axis; but for those
of which ranks keep terms afterwards, as of an output that is declared Partial: these terms have the
narrow dtype, and what is rounded term by term is not what is rounded as a whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.layouts.layout import Layout
from mdfuse.passes.segmentation import gives_chunks

name = "widen_sums"


def run(fusion: Fusion, dtype: torch.dtype) -> Fusion:
    """Return the fusion in which sums of narrower floats are reduced in a dtype."""
    values = dict(fusion.values)
    exprs: list[Expr] = []
    #: a Partial value -> itself in the wider dtype
    wide: dict[str, str] = {}
    for expr in fusion.exprs:
        if expr.op != "set" or not _is_rounded(values[expr.reads[0]], values[expr.output], dtype):
            exprs.append(expr)
            continue
        (x,), y = expr.reads, expr.output
        if x not in wide:
            wide[x] = _added(values, values[x], dtype)
            exprs.append(_cast(expr, "widen", x, wide[x], dtype))
        reduced = _added(values, replace(values[y], is_law=False), dtype)
        exprs.append(replace(expr, inputs=(wide[x],), outputs=(reduced,)))
        exprs.append(_cast(expr, "cast", reduced, y, values[y].dtype))
        if not gives_chunks(fusion, expr):  # the sum is there behind the loop that adds it up
            values[y] = replace(values[y], stream=None)
    return replace(fusion, values=values, exprs=tuple(exprs))


def _is_rounded(before: Value, after: Value, dtype: torch.dtype) -> bool:
    """Return whether a set adds up floats that are narrower than the dtype."""
    is_narrow = before.dtype.is_floating_point and before.dtype.itemsize < dtype.itemsize
    return is_narrow and _adds(before.placed, after.placed)


def _adds(before: Layout, after: Layout) -> bool:
    return {*before.reduce_ops.values()} == {"sum"} and not after.partial_axes


def _added(values: dict[str, Value], like: Value, dtype: torch.dtype) -> str:
    wide = fresh_name(values, f"{like.name}.wide")
    values[wide] = replace(like, name=wide, dtype=dtype, expanded=frozenset(), order_from="op")
    return wide


def _cast(by: Expr, op: str, x: str, y: str, dtype: torch.dtype) -> Expr:
    return replace(by, op=op, inputs=(x,), outputs=(y,), attrs=(("dtype", dtype),))
