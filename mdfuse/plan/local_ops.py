"""Prepare rows of the op table, on this rank's parts.

Where the result has no buffer yet, it is bound; where it has one (preallocated, or a slice of a
larger one), it is written there, in place where torch can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.hir.instructions import is_library
from mdfuse.hir.program import Instruction
from mdfuse.ir import ops
from mdfuse.ir.graph import Operand
from mdfuse.ir.infer import dense_strides
from mdfuse.ir.out_forms import Write
from mdfuse.ir.scalars import scalar_call
from mdfuse.ir.writes import (
    by_rows,
    fresh_write,
    in_order,
    is_dense_result,
    ordered_write,
    rows_of,
    write_of,
)
from mdfuse.plan.allocation import empty, new_buffer
from mdfuse.plan.context import Context
from mdfuse.plan.lines import Line, SlotRef, drop


def compute(i: Instruction, context: Context) -> list[Line]:
    """Return the calls of an op of the table, on this rank's parts."""
    row = ops.TABLE[i.fn]
    if row.results > 1:
        return _several(i, row, context)
    (output,) = i.outputs
    shape = context.local(output)
    if context.type(output).layout is None:
        return [_scalar(i, row, context)]
    if math.prod(shape) == 0 and not context.is_counted(output):
        return empty(output, i.order, context)
    attrs = dict(i.attrs)
    if row.is_creation:
        attrs["device"] = context.device
    if context.has_buffer(output):
        return [_written(i, row, attrs, context)]
    i = _as_rows_lie(i, row, context)
    if context.in_unit:
        return _bound(i, row, attrs, context)
    write = _ordered_write(i, row, context)
    if write is not None:
        kwargs = (*attrs.items(), ("out", context.ref(output)))
        line = Line(run=write, args=_operands(i, context), kwargs=kwargs)
        return [*new_buffer(output, i.order, context), line]
    lines = _reshaped(i, row, attrs, context) or _filled(i, row, attrs, context)
    return lines or _bound(i, row, attrs, context)


def _as_rows_lie(i: Instruction, row: ops.Op, context: Context) -> Instruction:
    """Return a product that states the order of its operand's rows, unless it or a user tells."""
    is_free = i.order is None and i.outputs[0] not in context.program.outputs
    if not row.writes.is_product or not is_free:
        return i
    return replace(i, order=rows_of(row, _facts(i, context)))


def _facts(i: Instruction, context: Context) -> list[Tensor | None]:
    return [context.fact(x) for x in i.reads if _is_tensor(x, context)]


def _several(i: Instruction, row: ops.Op, context: Context) -> list[Line]:
    """Return the calls of an op with several results: one, and copies into buffers that are there.

    A result whose name has no buffer is bound.
    """
    if all(math.prod(context.local(name)) == 0 for name in i.outputs):
        return [line for name in i.outputs for line in empty(name, None, context)]
    facts = _facts(i, context)
    is_dense = is_dense_result(row, facts)
    into, behind, nbytes = [], list[Line](), 0
    for name in i.outputs:
        shape, dtype = context.local(name), context.type(name).dtype
        nbytes += math.prod(shape) * dtype.itemsize
        if context.has_buffer(name):
            into.append(slot := context.new_slot())
            behind += [Line(run="copy_", args=(context.ref(name), SlotRef(slot))), drop(slot)]
            continue
        into.append(context.slot(name))
        context.know(name, context.dense(name) if is_dense else None)
    args = _operands(i, context)
    line = Line(run=row.call, args=args, kwargs=i.attrs, into=tuple(into), makes=nbytes)
    return [line, *behind]


def _ordered_write(i: Instruction, row: ops.Op, context: Context) -> Write | None:
    """Return the call that writes the result in the order asked for, where torch's own differs."""
    if i.order is None or not i.inputs or not _is_tensor(i.inputs[0], context):
        return None
    facts = _facts(i, context)
    if list(i.order) == list(range(len(i.order))) and not _follows_operand(row, facts):
        return None
    return ordered_write(row, i.order, facts)


def _follows_operand(row: ops.Op, facts: Sequence[Tensor | None]) -> bool:
    """Tell whether an exact op's own result would follow an operand that is not row-major."""
    is_exact = row.is_elementwise and row.writes.is_exact
    return is_exact and any(x is not None and not x.is_contiguous() for x in facts)


def _operands(i: Instruction, context: Context) -> tuple[Any, ...]:
    return tuple(context.ref(x) if isinstance(x, str) else x for x in i.inputs)


def _is_tensor(x: Operand, context: Context) -> bool:
    return isinstance(x, str) and context.type(x).layout is not None


def _call(i: Instruction, row: ops.Op, attrs: dict[str, Any], context: Context) -> Line:
    (output,) = i.outputs
    return Line(
        run=row.call,
        args=_operands(i, context),
        kwargs=tuple(attrs.items()),
        into=context.slot(output),
        shares=(context.slot(i.reads[0]),) if row.is_view and i.reads else (),
        is_view=row.is_view,
    )


# -- results that have no buffer -------------------------------------------------------------------


def _filled(
    i: Instruction, row: ops.Op, attrs: dict[str, Any], context: Context
) -> list[Line] | None:
    """Write the result into a new buffer that the plan may keep; None where torch makes it.

    Outputs are new in each run, so torch may as well make them.
    """
    (output,) = i.outputs
    if not _may_keep(output, context) or not i.inputs or not _is_tensor(i.inputs[0], context):
        return None
    is_plain = _is_plain(i.order)
    if not is_plain and not row.writes.is_exact:  # torch would add up in another sequence
        return None
    write = fresh_write(row, _facts(i, context))
    if write is None:
        return None
    lines = new_buffer(output, i.order, context)
    kwargs = (*attrs.items(), ("out", context.ref(output)))
    may = row.is_elementwise
    return [*lines, Line(run=write, args=_operands(i, context), kwargs=kwargs, in_place=may)]


def _may_keep(output: str, context: Context) -> bool:
    is_sized = not context.is_counted(output)
    return is_sized and context.one_stream and output not in context.program.outputs


def _is_plain(order: tuple[int, ...] | None) -> bool:
    return order is None or list(order) == list(range(len(order)))


def _reshaped(
    i: Instruction, row: ops.Op, attrs: dict[str, Any], context: Context
) -> list[Line] | None:
    """Reshape by a copy; None where the result is a view, or where torch copies.

    After a copy the operand is free; a view would keep it in use until the last use of the result.
    """
    (output,) = i.outputs
    fact = context.fact(i.reads[0]) if row.name == "reshape" else None
    if fact is None or not _may_keep(output, context) or not _is_plain(i.order):
        return None
    if row.call(fact, **attrs).untyped_storage()._cdata == fact.untyped_storage()._cdata:
        return None
    target, form, shaped = context.ref(output), tuple(fact.shape), context.new_slot()
    return [
        *new_buffer(output, i.order, context),
        Line(run="view", args=(target, form), into=shaped, shares=(target.slot,), is_view=True),
        Line(run="copy_", args=(SlotRef(shaped), context.ref(i.reads[0]))),
        drop(shaped),
    ]


def _bound(i: Instruction, row: ops.Op, attrs: dict[str, Any], context: Context) -> list[Line]:
    (output,) = i.outputs
    line = _call(i, row, attrs, context)
    if not row.is_view:
        dtype, shape = context.type(output).dtype, context.local(output)
        line = replace(line, makes=math.prod(shape) * dtype.itemsize)
    facts, order = _facts(i, context), i.order
    needed = facts[: row.operands[0]]  # a view may read how far it goes
    if order is not None and rows_of(row, facts) == order:
        line = replace(line, run=partial(by_rows, row, order))
        context.know(output, context.dense(output, order))
    elif row.is_view and needed and all(x is not None for x in needed):
        context.know(output, row.call(*needed, **attrs))
    elif row.is_creation or is_dense_result(row, facts):
        context.know(output, context.dense(output))
    return ordered(i, context, line)


# -- results that have a buffer --------------------------------------------------------------------


def _written(i: Instruction, row: ops.Op, attrs: dict[str, Any], context: Context) -> Line:
    """Write the result into the buffer that its name has."""
    (output,) = i.outputs
    target, operands, overlaps = context.ref(output), _operands(i, context), _overlaps(i, context)
    may = not overlaps and not row.is_creation and context.is_on_device(output)
    may = may and _is_tensor(i.inputs[0], context)
    ordered = _ordered_write(i, row, context) if may and not row.writes.is_exact else None
    run = (
        in_order(i.order, ordered) if ordered is not None and i.order is not None else write_of(row)
    )
    if run is not None and may:
        kwargs = (*attrs.items(), ("out", target))
        return Line(run=run, args=operands, kwargs=kwargs)
    call = row.call

    def copy(target: Tensor, *operands: Any) -> None:
        target.copy_(call(*operands, **attrs))

    def copy_from_itself(target: Tensor, *operands: Any) -> None:
        target.copy_(call(*operands, **attrs).clone())

    run = copy_from_itself if overlaps and row.is_view else copy
    return Line(run=run, args=(target, *operands))


def _overlaps(i: Instruction, context: Context) -> bool:
    """Tell whether an operand that is still read may be overwritten meanwhile."""
    (output,) = i.outputs
    sharing = {x for x in i.reads if context.share(x, output)}
    return bool(sharing) and not (
        sharing == {output} and ops.TABLE[i.fn].updates(i.inputs, sharing)
    )


# -- memory order --------------------------------------------------------------------------------


def ordered(i: Instruction, context: Context, line: Line) -> list[Line]:
    """Make the result dense in the order asked for; free where it lies so already.

    The result is always a copy where the memory that it would share is written again. Results of a
    library share no memory.
    """
    (output,) = i.outputs
    if i.order is None:
        return [line]
    shape = context.local(output)
    is_taken = output in context.updated and not is_library(i)
    strides = dense_strides(shape, i.order)
    plain, fact = replace(line, into=context.new_slot()), context.fact(output)
    (plain_slot,) = plain.targets
    context.know(output, context.dense(output, i.order))
    if fact is None and not is_taken:
        args, target = (SlotRef(plain_slot), shape, strides), context.slot(output)
        arranged = Line(run=_in_order, args=args, into=target, shares=(plain_slot,))
        return [plain, arranged, drop(plain_slot)]
    if is_taken or not _lies_so(shape, fact.stride(), strides):  # type: ignore[union-attr]
        copy = Line(run="copy_", args=(context.ref(output), SlotRef(plain_slot)))
        return [plain, *new_buffer(output, i.order, context), copy, drop(plain_slot)]
    if fact.stride() == strides:  # type: ignore[union-attr]
        return [line]
    args = (SlotRef(plain_slot), shape, strides)
    view = Line(
        run="as_strided", args=args, into=context.slot(output), shares=(plain_slot,), is_view=True
    )
    return [plain, view, drop(plain_slot)]


def _lies_so(shape: tuple[int, ...], actual: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether strides are those asked for; strides of dims of one element mean nothing."""
    return all(n <= 1 or s == t for n, s, t in zip(shape, actual, strides, strict=True))


def _in_order(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return the tensor itself where it has these strides, else a copy that has."""
    if x.stride() == strides:
        return x
    if _lies_so(shape, x.stride(), strides):
        return x.as_strided(shape, strides)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


# -- numbers -------------------------------------------------------------------------------------


def _scalar(i: Instruction, row: ops.Op, context: Context) -> Line:
    """Compute an op on numbers only: by torch on the CPU, in the widest type of its kind."""
    attrs = dict(i.attrs)

    def compute_number(*operands: Any) -> Any:
        return scalar_call(lambda *x: row.call(*x, **attrs), operands)

    args = _operands(i, context)
    return Line(run=compute_number, args=args, into=context.slot(i.outputs[0]))
