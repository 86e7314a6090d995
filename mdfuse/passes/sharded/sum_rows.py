"""Sum products of rows over all dims of the rows, where rows as one dim would lose a split.

    %a: f64[40,7] (dp=R) = reshape(%x)                              # %x: f64[5,8,7] (dp=S1)
    %t: f64[7,40] (dp=R) = permute(%a, dims=[1,0])
    %b: f64[40,9] (dp=R) = reshape(%y)                              # %y: f64[5,8,9] (dp=S1)
    %w: f64[7,9] (dp=R) = matmul(%t, %b)
->
    %w: f64[7,9] (dp=P(sum)) = contract(%x, %y, left=[0,1,2], right=[0,1,3], kept=[2,3])

Gradients of weights have this form. Where the first dim is split, rows as one dim are, too.

Likewise sums over groups of a dim, where there are fewer groups than ranks that split it:

    %a: f32[1,2,4,9,6] (tp=R) = reshape(%x)                         # %x: f32[1,8,9,6] (tp=S1), tp=4
    %s: f32[1,2,9,6] (tp=R) = sum(%a, dims=[2])
->
    %i: i64[8] (tp=R) = floor_divide(%n, 4)                         # %n counts from 0 to 7
    %s: f32[1,2,9,6] (tp=P(sum)) = index_sum(%i, %x, along=1)

Gradients of heads that several heads of the query share have this form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from mdfuse.extents.extent import comparable
from mdfuse.ir.dims import reduced_dims
from mdfuse.ir.graph import Expr, Fusion, Operand
from mdfuse.layouts.layout import Layout
from mdfuse.passes.rewriting import Maker, Rule, laid_out
from mdfuse.passes.strategy import choose

name = "sum_rows"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with such products as contractions, such sums as sums by index."""
    fusion = laid_out(fusion, contractions(fusion, lambda view: _loses(fusion, view)))
    groups = {e.output: _grouped(fusion, e) for e in fusion.exprs if e.op == "sum"}
    return laid_out(
        fusion,
        {
            name: partial(_sum_groups, groups=of)
            for name, of in groups.items()
            if of is not None and _loses(fusion, of.view)
        },
    )


def contractions(fusion: Fusion, is_asked: Callable[[Expr], bool]) -> dict[str, Rule]:
    """Return the rules that make products of rows contractions; the views of rows stay.

    Args:
        fusion: with layouts.
        is_asked: whether one of the views of a product, a reshape, speaks for it.
    """
    products = {e.outputs[0]: _product(fusion, e) for e in fusion.exprs}
    return {
        name: partial(_contract, product=product)
        for name, product in products.items()
        if product is not None and any(is_asked(side.view) for side in product.sides)
    }


def _contract(maker: Maker, by: Expr, product: _Product) -> None:
    left, right = (_rows_of(maker, by, side) for side in product.sides)
    dims = (*range(product.dims),)
    first, last = product.dims, product.dims + 1
    maker.op(
        by, "contract", left, right, last=True,
        left=(*dims, first), right=(*dims, last), kept=(first, last),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _RowsMatrix:
    """A matrix that is a view of rows.

    Attributes:
        view: what makes it.
        layout: of the rows, where sets behind the view change it.
    """

    view: Expr
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of a matrix's transpose and a matrix that are views of the same rows.

    Attributes:
        sides: the two matrices.
        dims: how many dims the rows have, more than one.
    """

    sides: tuple[_RowsMatrix, _RowsMatrix]
    dims: int


def _product(fusion: Fusion, expr: Expr) -> _Product | None:
    if expr.op != "matmul":
        return None
    left, right = (_side(fusion, x, n == 0) for n, x in enumerate(expr.inputs))
    if left is None or right is None:
        return None
    rows = [_rows(fusion, side.view) for side in (left, right)]
    if rows[0] is None or rows[0] != rows[1]:
        return None
    return _Product((left, right), len(fusion.values[left.view.reads[0]].shape) - 1)


def _side(fusion: Fusion, x: Operand, turned: bool) -> _RowsMatrix | None:
    """Return the view behind an operand, through transposes and sets that keep rows."""
    producer, turns, is_set = _producer(fusion, x), 0, False
    while producer is not None and producer.op in ("set", "permute"):
        if producer.op == "permute" and producer.kwargs["dims"] != (1, 0):
            return None
        turns += producer.op == "permute"
        is_set |= producer.op == "set"
        producer = _producer(fusion, producer.inputs[0])
    if producer is None or producer.op != "reshape" or turns % 2 != turned:
        return None
    if not is_set or not isinstance(x, str):
        return _RowsMatrix(producer, None)
    before, after = fusion.values[producer.reads[0]], fusion.layout(x)
    if fusion.layout(before.name).mesh != after.mesh or after.split_axes(int(turned)):
        return None
    return _RowsMatrix(producer, after.with_dims({int(not turned): len(before.shape) - 1}))


def _rows_of(maker: Maker, expr: Expr, side: _RowsMatrix) -> str:
    """Return the rows that a matrix is a view of, set as the matrix is."""
    (x,) = side.view.reads
    if side.layout in (None, maker.values[x].layout):
        return x
    rows = maker.op(expr, "set", x)
    maker.values[rows] = replace(maker.values[rows], layout=side.layout)
    return rows


@dataclass(frozen=True, slots=True)
class _AddedGroups:
    """Groups of a dim that are added up.

    Attributes:
        view: a reshape that makes two dims of the dim.
        dim: of the operand of the view.
        size: of a group.
    """

    view: Expr
    dim: int
    size: int


def adds_groups(fusion: Fusion, expr: Expr) -> bool:
    """Return whether a sum adds up groups of a dim, each to one element."""
    return _grouped(fusion, expr) is not None


def _grouped(fusion: Fusion, expr: Expr) -> _AddedGroups | None:
    """Return the groups that a sum adds up, each to one element; None for other sums."""
    (x,), out = expr.reads, fusion.values[expr.output]
    opened, dtype = fusion.values[x].shape, fusion.values[x].dtype
    dims = reduced_dims(expr.kwargs.get("dims"), len(opened))
    if len(dims) != 1 or dims[0] == 0 or not all(type(n) is int for n in opened):
        return None
    if out.stream is not None or out.dtype != dtype or not dtype.is_floating_point:
        return None
    dim = dims[0] - 1
    count, size = opened[dim : dim + 2]
    merged, view = (*opened[:dim], count * size, *opened[dim + 2 :]), _producer(fusion, x)
    while view is not None and view.op == "reshape" and 0 not in merged:
        (y,) = view.reads
        if fusion.values[y].shape == merged:
            return _AddedGroups(replace(view, outputs=(x,), attrs=(("shape", opened),)), dim, size)
        view = _producer(fusion, y)
    return None


def _sum_groups(maker: Maker, by: Expr, groups: _AddedGroups) -> None:
    """Append a sum by index, with terms that are rounded once, as those of a sum."""
    (x,) = groups.view.reads
    out, shape = maker.values[by.output], [*maker.values[x].shape]
    places = maker.op(by, "arange", 0, 1, shape=(shape[groups.dim],), dtype=torch.int64)
    index = maker.op(by, "floor_divide", places, groups.size)
    wide = maker.wide(by, x)
    shape[groups.dim] //= groups.size
    total = maker.op(by, "index_sum", index, wide, along=groups.dim, shape=(*shape,))
    if wide != x:
        total = maker.op(by, "round_terms", total, dtype=out.dtype)
    maker.op(by, "reshape", total, last=True, shape=out.shape)


def _producer(fusion: Fusion, x: Operand) -> Expr | None:
    return fusion.producers.get(x) if isinstance(x, str) else None


def _rows(fusion: Fusion, view: Expr) -> object:
    """Return the extents of the dims that a view makes one of, all but the last; else None."""
    *rows, features = fusion.values[view.reads[0]].shape
    shape = fusion.values[view.output].shape
    is_matrix = len(shape) == 2 and comparable(shape[1]) == comparable(features)
    return comparable(tuple(rows)) if is_matrix and len(rows) > 1 else None


def _loses(fusion: Fusion, view: Expr) -> bool:
    """Return whether a view gathers a split along one of the dims that it merges."""
    strategy = choose(view, fusion.values)
    (x,) = view.reads
    layout = fusion.values[x].layout
    if strategy is None or layout is None:
        return False
    split_layout = strategy.wanted[x]
    dims = range(len(fusion.values[x].shape) - 1)
    return split_layout.mesh == layout.mesh and any(
        a not in split_layout.split_axes(d) for d in dims for a in layout.split_axes(d)
    )
