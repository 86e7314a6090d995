"""Rewrite running sums and the largest elements along a split dim, so that few numbers travel.

    %y: f32[8,64] (tp=S1) = cumsum(%x, dim=1)                       # %x is (tp=S1), tp=4
    %v, %i: f32[8,2] (tp=R) = topk(%x, k=2, dim=1)
->
    %p: f32[8,4,16] (tp=S1) = reshape(%x, shape=[8,4,16])           # of each rank its part
    %s: f32[8,4,16] (tp=S1) = cumsum(%p, dim=2)
    %t: f32[8,4,1] (tp=R) = slice(%s, starts=[0,0,15], ...)         # the sums of parts travel
    %y: f32[8,64] (tp=S1) = reshape(add(%s, ...))                   # plus the sums of parts before
    %c, %d: f32[8,4,2] (tp=S1) = topk(%p, k=2, dim=2)               # candidates, which travel
    %v, %j: f32[8,2] (tp=R) = topk(reshape(%c), k=2, dim=1)

This is done where the parts are equal, and where it takes less than half the bytes of bringing the
operand together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from mdfuse.ir.graph import Expr, Fusion, fresh_name
from mdfuse.layouts.layout import Replicate
from mdfuse.passes.rewriting import Maker, laid_out
from mdfuse.passes.sharded.keep_splits import is_gathered, may_stay, with_placements
from mdfuse.reshard import cost

name = "split_scans"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with these ops rewritten wherever that moves fewer bytes."""
    split = {e.outputs[0]: e for e in _split(fusion)}
    rules = {x: partial(_RULES[e.op], parts=_parts(fusion, e)) for x, e in split.items()}
    return laid_out(fusion, rules)


# -- which ---------------------------------------------------------------------------------------


def _split(fusion: Fusion) -> Iterator[Expr]:
    for expr in fusion.exprs:
        if expr.op not in _RULES:
            continue
        value, parts = fusion.values[expr.reads[0]], _parts(fusion, expr)
        if parts < 2 or value.expanded or 0 in value.shape:
            continue
        if any(fusion.values[x].stream is not None for x in (value.name, *expr.outputs)):
            continue
        dim, layout = expr.kwargs["dim"] % len(value.shape), fusion.layout(value.name)
        n, axes = value.shape[dim], layout.split_axes(dim)
        each = min(expr.kwargs.get("k", 1), n // parts)
        whole = with_placements(layout, axes, Replicate())
        few = (*value.shape[:dim], parts * each, *value.shape[dim + 1 :])
        size = value.dtype.itemsize
        price = cost(layout, whole, few) * (size + 8 if expr.op == "topk" else max(size, 4))
        if not 2 * price < cost(layout, whole, value.shape) * size:
            continue
        stays = expr.op == "topk" or may_stay(fusion, expr, (dim,))
        if each and stays and not is_gathered(fusion, value, axes, _RULES):
            yield expr


def _parts(fusion: Fusion, expr: Expr) -> int:
    """Return the number of equal parts of the operand along the dim of a scan; 0 if unequal."""
    value, layout = fusion.values[expr.reads[0]], fusion.layout(expr.reads[0])
    if not value.shape:
        return 0
    dim = expr.kwargs["dim"] % len(value.shape)
    parts = math.prod(layout.mesh.axis_size(a) for a in layout.split_axes(dim))
    is_even = type(value.shape[dim]) is int and value.shape[dim] % parts == 0
    is_plain = not layout.partial_axes and dim not in layout.blocked
    return parts if is_even and is_plain else 0


# -- by what -------------------------------------------------------------------------------------


def _window(maker: Maker, by: Expr, x: str, dim: int, start: int, end: int) -> str:
    shape = maker.values[x].shape
    starts = tuple(start if d == dim else 0 for d in range(len(shape)))
    ends = tuple(end if d == dim else n for d, n in enumerate(shape))
    return maker.op(by, "slice", x, starts=starts, ends=ends, steps=(1,) * len(shape))


def _cumsum(maker: Maker, by: Expr, parts: int) -> None:
    """Sum up within the parts, and add the sums of the parts before."""
    x, dtype = by.reads[0], maker.values[by.output].dtype
    shape = maker.values[x].shape
    dim = by.kwargs["dim"] % len(shape)
    n = shape[dim] // parts
    apart = maker.op(
        by, "reshape", maker.wide(by, x), shape=(*shape[:dim], parts, n, *shape[dim + 1 :])
    )
    part_sums = maker.op(by, "cumsum", apart, dim=dim + 1)
    totals = maker.op(by, "cumsum", _window(maker, by, part_sums, dim + 1, n - 1, n), dim=dim)
    before = _window(maker, by, totals, dim, 0, parts - 1)
    starts = tuple(int(d == dim) for d in range(len(shape) + 1))
    whole = maker.values[totals].shape
    shifted = maker.op(
        by, "slice_grad", before, shape=whole, starts=starts, steps=(1,) * len(whole)
    )
    sums = maker.op(by, "add", part_sums, shifted)
    if maker.values[sums].dtype == dtype:
        maker.op(by, "reshape", sums, last=True, shape=shape)
    else:
        narrow = maker.op(by, "cast", sums, dtype=dtype)
        maker.op(by, "reshape", narrow, last=True, shape=shape)


def _topk(maker: Maker, by: Expr, parts: int) -> None:
    """Take the largest of each part, and of these the largest."""
    x, k = by.reads[0], by.kwargs["k"]
    direction = {"smallest": True} if by.kwargs.get("smallest") else {}
    shape = maker.values[x].shape
    dim = by.kwargs["dim"] % len(shape)
    n = shape[dim] // parts
    each = min(k, n)
    behind = (1,) * (len(shape) - dim)
    apart = maker.op(by, "reshape", x, shape=(*shape[:dim], parts, n, *shape[dim + 1 :]))
    values = fresh_name(maker.values, f"{by.outputs[0]}.candidates")
    at = maker.several(by, "topk", apart, first=values, k=each, dim=dim + 1, **direction)
    start = maker.op(by, "arange", 0, n, shape=(parts,), dtype=maker.values[at].dtype)
    start = maker.op(by, "reshape", start, shape=(parts, *behind))
    flat = (*shape[:dim], parts * each, *shape[dim + 1 :])
    places = maker.op(by, "reshape", maker.op(by, "add", at, start), shape=flat)
    candidates = maker.op(by, "reshape", values, shape=flat)
    chosen = maker.several(by, "topk", candidates, first=by.outputs[0], k=k, dim=dim, **direction)
    maker.op(by, "gather", chosen, places, last=True, along=dim)


_RULES = {"cumsum": _cumsum, "topk": _topk}
