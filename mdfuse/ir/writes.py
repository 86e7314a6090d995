"""Results written into a buffer by torch's `out=` forms, where they give the same bits.

A form is used where the buffer lies as the plain result would, or where the op is exact whatever
the way; else the result is computed and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.infer import memory_order
from mdfuse.ir.ops import Op
from mdfuse.ir.out_forms import Write
from mdfuse.ir.tensors import PLAIN


def is_dense_result(op: Op, facts: Sequence[Tensor | None]) -> bool:
    """Return whether the result that an op allocates itself is surely contiguous.

    Args:
        op: a row of the op table.
        facts: for each tensor operand, a meta tensor with its strides, or None: not known.
    """
    if op.writes.is_product and all(x is not None and x.ndim == 2 for x in facts):
        return True
    known = op.writes.is_dense and all(x is not None and x.is_contiguous() for x in facts)
    shapes = {x.shape for x in facts if x is not None and x.ndim}
    return known and (len(shapes) == 1 or op.writes.form is None)


def fresh_write(op: Op, facts: Sequence[Tensor | None]) -> Write | None:
    """Return how an op fills a new buffer with the bits of its call; None where they may differ.

    Args:
        op: a row of the op table.
        facts: for each tensor operand, a meta tensor with its strides, or None: not known.
    """
    if op.name == "matmul" and all(x is not None and x.ndim == 2 for x in facts):
        return torch.mm  # what matmul comes to, without its look at the shapes
    is_same = op.writes.is_exact or op.writes.is_product
    if is_same or all(x is not None and x.is_contiguous() for x in facts):
        return op.writes.form
    return None


# -- new buffers in another memory order ---------------------------------------------------------


def has_orders(op: Op, order: Sequence[int], ndims: Sequence[int]) -> bool:
    """True if torch writes the op's result in another memory order than its own, with no copy.

    Exact ops give the same bits in all of them. A sum or a product adds in another sequence where
    its result lies otherwise, so an order that is asked for is a part of what is computed: it is
    written by `ordered_write`, in whatever buffer (`in_order`).

    Args:
        op: a row of the op table.
        order: dims from outermost to innermost.
        ndims: how many dims each tensor operand has.
    """
    if op.writes.is_product:
        return _product_in(order, op.name, ndims) is not None
    return op.writes.form is not None and (op.writes.is_exact or op.host == "reduce")


def ordered_write(op: Op, order: Sequence[int], facts: Sequence[Tensor | None]) -> Write | None:
    """Return how an op fills a new buffer that is dense in an order; None where it may copy."""
    known = [x for x in facts if x is not None]
    if not op.writes.is_product:
        return op.writes.form if has_orders(op, order, ()) else None
    if len(known) < len(facts) or any(1 in x.shape for x in known):
        return None
    x, w = known[:2]
    if rows_of(op, known) == tuple(order):
        return partial(_folded, op, tuple(order))
    write = _product_in(order, op.name, [x.ndim, w.ndim])
    if write in (_columns, _linear_columns):
        return write if x.ndim == 2 or x.is_contiguous() else None
    return write if write is not torch.bmm or x.shape[0] == w.shape[0] else None


def in_order(order: Sequence[int], write: Write) -> Write:
    """Return a write with the bits of an `ordered_write`, into a buffer that may lie anyhow."""
    order, back = tuple(order), _back(order)

    def either(*operands: Any, out: Tensor, **attrs: Any) -> None:
        if _lies_plainly(out.permute(order)):
            write(*operands, out=out, **attrs)
        else:
            new = out.new_empty([out.shape[d] for d in order]).permute(back)
            write(*operands, out=new, **attrs)
            out.copy_(new)

    return either


def _product_in(order: Sequence[int], name: str, ndims: Sequence[int]) -> Write | None:
    """Return the product that writes its result in an order; None where there is none."""
    x, w = ndims[:2]
    if w == 2 and tuple(order) == (x - 1, *range(x - 1)):
        return _columns if name == "matmul" else _linear_columns
    if w == 2 and tuple(order) == (1, 0, 2):
        return _rows if name == "matmul" else _linear_rows
    return torch.bmm if x == w == 3 and order[-1] != 0 else None


def rows_of(op: Op, facts: Sequence[Tensor | None]) -> tuple[int, ...] | None:
    """Return the order in which the rows lie that a product multiplies by a matrix.

    None where they lie row by row, or are no dense rows. A product that lies as they do is one of
    two matrices, for which nothing is copied.
    """
    if not op.writes.is_product or any(x is None for x in facts):
        return None
    x, w = facts[:2]
    assert x is not None and w is not None
    order = memory_order(x.stride())
    if w.ndim != 2 or x.ndim < 3 or x.is_contiguous() or order[-1] != x.ndim - 1:
        return None
    return order if x.permute(order).is_contiguous() else None


def by_rows(op: Op, order: tuple[int, ...], x: Tensor, *others: Tensor) -> Tensor:
    """Return a product whose rows lie in an order, as those of its first operand do."""
    rows = x.permute(order)
    product: Tensor = op.call(rows.flatten(0, -2), *others)
    apart: Tensor = product.unflatten(0, rows.shape[:-1])
    return apart.permute(_back(order))


def _folded(op: Op, order: tuple[int, ...], x: Tensor, *others: Tensor, out: Tensor) -> None:
    """Write `by_rows`, into a buffer that lies in this order."""
    rows, into = (each.permute(order).flatten(0, -2) for each in (x, out))
    assert op.writes.form is not None
    op.writes.form(rows, *others, out=into)


def _back(order: Sequence[int]) -> list[int]:
    return [list(order).index(d) for d in range(len(order))]


def _columns(x: Tensor, w: Tensor, *, out: Tensor, bias: Tensor | None = None) -> None:
    """Write a product whose result has its columns outermost, as one product of two matrices."""
    x, into = x.flatten(0, -2), out.flatten(0, -2)
    if bias is None:
        torch.mm(x, w, out=into)
    else:
        torch.addmm(bias, x, w, out=into)


def _rows(x: Tensor, w: Tensor, *, out: Tensor, bias: Tensor | None = None) -> None:
    """Write a product whose result has dims 0 and 1 swapped in memory: a product for each x[i]."""
    w = w.expand(x.shape[0], *w.shape)
    if bias is None:
        torch.bmm(x, w, out=out)
    else:
        torch.baddbmm(bias, x, w, out=out)


def _linear_columns(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    _columns(x, w.t(), out=out, bias=bias)


def _linear_rows(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    _rows(x, w.t(), out=out, bias=bias)


# -- given buffers -------------------------------------------------------------------------------


def write_of(op: Op) -> Write | None:
    """Return how an op writes the bits of its call into any buffer; None where torch cannot."""
    form = op.writes.form
    if form is None or op.writes.is_exact:
        return form
    return _where_alike(op.call, form, _are_rows if op.writes.is_product else _are_dense)


def _where_alike(
    call: Callable[..., Any], write: Write, may: Callable[[Tensor, Sequence[Any]], bool]
) -> Write:
    """Return a write that uses `write` where it goes through memory as `call` does, else copies."""

    def either(*operands: Any, out: Tensor, **attrs: Any) -> None:
        if _lies_plainly(out) and may(out, operands):
            write(*operands, out=out, **attrs)
        else:
            out.copy_(call(*operands, **attrs))

    return either


def _lies_plainly(out: Tensor) -> bool:
    """True if a buffer lies as a new one does: dense, at an address that is a multiple of 64.

    One that is traced for a compiler has no address: compiled code has bits of its own.
    """
    return out.is_contiguous() and (type(out) not in PLAIN or out.data_ptr() % 64 == 0)


def _are_dense(out: Tensor, operands: Sequence[Any]) -> bool:
    """True if all operands are contiguous; else the call's own result would lie otherwise."""
    return all(x.is_contiguous() for x in operands if isinstance(x, Tensor))


def _are_rows(out: Tensor, operands: Sequence[Any]) -> bool:
    """True if rows do not overlap by their stride, which cuBLAS looks at even for one row."""
    return out.ndim < 2 or out.stride(-2) >= out.shape[-1]
