"""Gradients of reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import reductions, views
from mdfuse.frontend.ops.recording import back, in_f32, record
from mdfuse.frontend.ops.reduction_parts import first_place
from mdfuse.frontend.vjps.table import (
    Applied,
    eq,
    gt,
    logical_and,
    op,
    product_of_others,
    rule,
    where,
    widely,
)
from mdfuse.ir.dims import reduced_dims


def _with_reduced_dims(e: Applied, reduced: Handle) -> Handle:
    """Return a result with its reduced dims kept, to broadcast against the operand."""
    shape = e.shape(0)
    dims = reduced_dims(e.attrs.get("dims"), len(shape))
    if e.attrs.get("keepdim") or not dims:
        return reduced
    return record("unsqueeze", reduced, dims=dims)


def _count(e: Applied) -> int:
    """Return the number of elements per element of the result."""
    shape = e.shape(0)
    return math.prod(shape[d] for d in reduced_dims(e.attrs.get("dims"), len(shape)))


def _repeated(e: Applied, ct: Handle) -> Handle:
    shape = e.shape(0)
    return views.expand(_with_reduced_dims(e, ct), shape) if shape else ct


@rule("sum")
def _sum(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (_repeated(e, ct),)


@rule("mean")
def _mean(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    count = _count(e)
    return (_repeated(e, ct / count if isinstance(count, Extent) or count else ct * math.inf),)


@rule("prod")
@widely
def _prod(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    x, over = e[0], reduced_dims(e.attrs.get("dims"), len(e.shape(0)))
    x = x if x.dtype == ct.dtype else record("cast", x, dtype=ct.dtype)
    if not over:
        return (ct,)
    others = product_of_others(
        x,
        product=lambda y: reductions.prod(y, over, True),
        total=lambda y: reductions.sum(y, over, True),
        has_zero=lambda zeros: record("any", zeros, dims=None),
    )
    if e.attrs.get("dims") is None:  # torch ignores other elements beside two zeros
        zeros = reductions.sum(record("cast", eq(x, 0), dtype=x.dtype), over, True)
        others = where(logical_and(gt(zeros, 1), op("isnan")(others)), 0.0, others)
    return (_with_reduced_dims(e, ct) * others,)


@rule("max", "min")
def _extreme(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Divide the cotangent evenly among equals, or give it to the first of them."""
    over = reduced_dims(e.attrs.get("dims"), len(e.shape(0)))
    if not over:
        return (ct,)
    if e.attrs.get("first"):
        places = first_place(e[0], _with_reduced_dims(e, e.y), over)
        first = record("min", places, dims=over, keepdim=True)
        return (where(eq(places, first), _with_reduced_dims(e, ct), 0.0),)
    is_there = eq(e[0], _with_reduced_dims(e, e.y))
    wide = in_f32(ct)  # 16 bits cannot count many equals
    equals = reductions.sum(record("cast", is_there, dtype=wide.dtype), over, True)
    return (where(is_there, back(_with_reduced_dims(e, wide) / equals, ct), 0.0),)


@rule("topk", "sort", "cummax", "cummin")
def _chosen(e: Applied, cts: Sequence[Any]) -> Sequence[Handle | None]:
    """Scatter the cotangent to the place of each element of the result."""
    ct, places, shape = cts[0], e.results[1], e.shape(0)
    if not shape:
        return (ct,)
    dim = e.attrs["dim"] % len(shape)
    return (record("scatter_reduce", places, ct, shape=shape, along=dim, reduce="sum"),)
