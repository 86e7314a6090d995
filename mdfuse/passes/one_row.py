"""Add up a batch of one row where an operation needs that row as a whole.

    %a: f32[3,4] = squeeze(%x, dims=[0])            # %x: f32[1,3,4], whose dim 0 is the batch's
    %g: f32[8,4] = slice_grad(%r, …)                # %r: f32[3,4], whose rows are those of one row
->
    %x.sum: f32[1,3,4] = sum(%x, dims=[0], keepdim=True)
    %a: f32[3,4] = squeeze(%x.sum, dims=[0])
    %r.reshape: f32[1,3,4] = reshape(%r)
    %r.sum: f32[3,4] = sum(%r.reshape, dims=[0])
    %g: f32[8,4] = slice_grad(%r.sum, …)

A batch of many rows has such a sum: for example, of gradients of a table of positions that each row
reads. A batch of one row has none, since nothing is broadcast; the row itself equals the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mdfuse.ir.dims import DimMap
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.layouts.stream import JOINED
from mdfuse.passes.rewriting import Maker
from mdfuse.passes.strategy import dim_map
from mdfuse.passes.streams import unit_stream

name = "one_row"


def added_up(fusion: Fusion, values: Mapping[str, Value]) -> Fusion | None:
    """Return the fusion with such sums; None where none is needed.

    Args:
        fusion: with layouts and sets, of a batch of one row.
        values: those of the fusion, in chunks where they have the batch's dim.
    """
    maker, sums = Maker(dict(fusion.values)), dict[str, str]()
    for expr in fusion.exprs:
        for x in _whole(expr, values):
            if x not in sums:
                sums[x] = _sum(maker, expr, values[x])
        maker.exprs.append(expr.reading({x: sums[x] for x in _whole(expr, values)}))
    return replace(fusion, values=maker.values, exprs=tuple(maker.exprs)) if sums else None


def _whole(expr: Expr, values: Mapping[str, Value]) -> list[str]:
    """Return the operands whose dim of the batch an expression neither keeps nor joins."""
    if not values[expr.outputs[0]].is_tensor or unit_stream(expr, values) is not None:
        return []
    labels, whole = dim_map(expr, values), list[str]()
    for x, dims in zip(expr.inputs, labels.operands, strict=True):
        stream = values[x].stream if isinstance(x, str) else None
        if not isinstance(x, str) or stream is None:
            continue
        if not _is_kept(dims[stream.dim], labels):
            whole.append(x)
    return whole


def _is_kept(label: int | None, labels: DimMap) -> bool:
    is_joined = label is not None and labels.reduces.get(label) in JOINED
    return is_joined or (
        label is not None and all(label in own_labels for own_labels in labels.results)
    )


def _sum(maker: Maker, by: Expr, x: Value) -> str:
    """Append the sum of a value over its one row of the batch; return its name."""
    assert x.stream is not None
    dim, shape, rows = x.stream.dim, x.shape, x.name
    how: dict[str, Any] = {"dims": (dim,), "keepdim": shape[dim] == 1, "dtype": x.dtype}
    if shape[dim] != 1:
        rows = maker.op(by, "reshape", rows, shape=(*shape[:dim], 1, *shape[dim:]))
        moved = x.placed.with_dims({d: d + (d >= dim) for d in range(len(shape))})
        maker.values[rows] = replace(maker.values[rows], layout=moved)
    total = maker.op(by, "sum", rows, **how)
    maker.values[total] = replace(maker.values[total], layout=x.placed)
    return total
