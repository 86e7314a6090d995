"""Prepare buffer operations: views of parts of a buffer, and the packing around posts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import ProgramError
from mdfuse.hir.instructions import INSTRUCTIONS, PURE_VIEWS
from mdfuse.hir.program import Instruction
from mdfuse.ir import attention
from mdfuse.ir.dtype_limits import neutral
from mdfuse.ir.ops import itself
from mdfuse.layouts.boxes import Box, Rows, boxes_of, nth_chunk, relative
from mdfuse.layouts.layout import Partial
from mdfuse.layouts.stream import JOINED
from mdfuse.names import base_name
from mdfuse.plan import counted_steps, product_steps
from mdfuse.plan.allocation import empty, new_buffer
from mdfuse.plan.context import Context
from mdfuse.plan.lines import Line, SlotRef, drop
from mdfuse.plan.local_ops import ordered

#: Makes a tensor of the operand: a function, or the name of a method.
_Call = Callable[..., Tensor] | str


def _bound_result(i: Instruction, context: Context, run: _Call, *args: Any) -> list[Line]:
    """Bind the result to the tensor that a call makes, or copy that tensor into its buffer.

    Pure views are views of the operand; all else is dense.
    """
    (output,), (operand,), is_view = i.outputs, i.reads, i.op in PURE_VIEWS
    source, fact = context.ref(operand), context.fact(operand)

    def call(x: Tensor) -> Tensor:
        result: Tensor = getattr(x, run)(*args) if isinstance(run, str) else run(x, *args)
        return result

    if not context.has_buffer(output):
        if not is_view:
            context.know(output, context.dense(output))
        elif fact is not None:
            context.know(output, call(fact))
        target, shares = context.slot(output), (source.slot,)
        line = Line(run=run, args=(source, *args), into=target, shares=shares, is_view=is_view)
        return ordered(i, context, line)
    overlaps = context.share(operand, output)

    def copy(target: Tensor, source: Tensor) -> None:
        x = call(source)
        target.copy_(x.clone() if overlaps else x)

    return [Line(run=copy, args=(context.ref(output), source))]


def _narrow(i: Instruction, context: Context) -> list[Line]:
    """Cut this rank's part of the result, or one chunk of it, out of the operand, as a view.

    Rows in several runs, as those in zigzag order, are copied, so that they lie side by side.

    Raises:
        ProgramError: the result's box is not inside the operand's.
    """
    (output,), (operand,) = i.outputs, i.reads
    if 0 in context.local(output):
        return empty(output, i.order, context)
    whole, part = context.box(operand), context.box(output)
    if any(p < a or q > b for (p, q), (a, b) in zip(part, whole, strict=True)):
        raise ProgramError(
            f"{i.op}(%{base_name(operand)}): %{base_name(output)} is no part of it",
            where=context.where(i),
            because=f"rank {context.rank} holds {whole} of one, and {part} of the other",
            hint="a part has the layout of the whole, split further",
        )
    before, after = (context.type(x).runs(context.rank) for x in (operand, output))
    rows: list[Rows] = [(interval,) for interval in relative(part, whole)]
    apart = after.keys() - before.keys()
    for dim in apart:
        first = whole[dim][0]
        rows[dim] = tuple((start - first, stop - first) for start, stop in after[dim])
    pairs = [tuple(map(_slices, boxes)) for boxes in boxes_of(rows)]
    if not apart:
        ((index, _),) = pairs
        return _bound_result(i, context, "__getitem__", index)

    overlaps = context.has_buffer(output) and context.share(operand, output)

    def copy(target: Tensor, source: Tensor) -> None:
        source = source.clone() if overlaps else source
        for index, place in pairs:
            target[place].copy_(source[index])

    lines = empty(output, i.order, context)
    return [*lines, Line(run=copy, args=(context.ref(output), context.ref(operand)))]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _select(i: Instruction, context: Context) -> list[Line]:
    """Take the slice at one index of a dim, as a view.

    Raises:
        ProgramError: the index is out of range for this rank's part.
    """
    (source,) = i.reads
    dim, index = i.kwargs["dim"], i.kwargs["index"]
    shape = context.local(source)
    extent = shape[dim]
    if extent == 1 or dim % len(shape) in context.expanded.get(source, ()):
        index = 0
    if not -extent <= index < extent:
        raise ProgramError(
            f"select(%{base_name(source)}, dim={dim}, index={index}): index {index} is out of "
            f"range for dim {dim}",
            where=context.where(i),
            because=f"%{base_name(source)} has shape {shape} on rank {context.rank}",
            hint=f"indices go from 0 to {extent - 1}",
        )
    return _bound_result(i, context, "select", dim, index)


def _unexpand(i: Instruction, context: Context) -> list[Line]:
    """Take one element of each expanded dim, as a view."""
    dims = i.kwargs["dims"]
    ndim = len(context.type(i.outputs[0]).shape)
    index = tuple(slice(0, 1) if d in dims else slice(None) for d in range(ndim))
    return _bound_result(i, context, "__getitem__", index)


def _pad(i: Instruction, context: Context) -> list[Line]:
    """Append zeros along a dim up to the length of a block; the result is dense."""
    (output,) = i.outputs
    shape, dim = context.local(output), i.kwargs["dim"]
    if context.local(i.reads[0]) == shape:
        return _bound_result(i, context, "contiguous")

    def pad(x: Tensor) -> Tensor:
        padded = x.new_zeros(shape)
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        return padded

    return _bound_result(i, context, pad)


def _pack(i: Instruction, context: Context) -> list[Line]:
    """Write the blocks along `to_dim` one after the other, each with the joined dim outermost."""
    attrs = i.kwargs
    layout = context.type(i.reads[0]).placed
    parts = layout.mesh.axis_size(attrs["axis"])
    extent = context.local(i.reads[0])[attrs["to_dim"]]
    fact = context.fact(i.reads[0])
    there = context.fact(i.outputs[0])
    may = not context.has_buffer(i.outputs[0]) or (there is not None and there.is_contiguous())
    if extent % parts == 0 and fact is not None and may:
        return _pack_evenly(i, context, fact, parts)
    blocks = [nth_chunk((0, extent), parts, n) for n in range(parts)]

    def pack(x: Tensor) -> Tensor:
        x = x.movedim(attrs["dim"], 0)
        to = attrs["to_dim"] + (attrs["to_dim"] < attrs["dim"])
        return torch.cat([x.narrow(to, a, b - a).reshape(-1) for a, b in blocks])

    return _bound_result(i, context, pack)


def _pack_evenly(i: Instruction, context: Context, fact: Tensor, parts: int) -> list[Line]:
    """Pack blocks of equal size in one copy, of a view with the dim of the blocks outermost."""
    (output,), attrs = i.outputs, i.kwargs
    rows = fact.unflatten(attrs["to_dim"], (parts, -1))
    dim = attrs["dim"] + (attrs["to_dim"] < attrs["dim"])
    rows = rows.movedim((attrs["to_dim"], dim), (0, 1))
    source, view = context.ref(i.reads[0]), context.new_slot()
    buffer, shaped = empty(output, None, context), context.new_slot()
    target, form = context.ref(output), (tuple(rows.shape), rows.stride())
    return [
        Line(
            run="as_strided", args=(source, *form), into=view, shares=(source.slot,), is_view=True
        ),
        *buffer,
        Line(run="view", args=(target, form[0]), into=shaped, shares=(target.slot,), is_view=True),
        Line(run="copy_", args=(SlotRef(shaped), SlotRef(view))),
        drop(view, shaped),
    ]


def _term(i: Instruction, context: Context) -> list[Line]:
    """Place this rank's part in a buffer that holds the reduce op's neutral element elsewhere.

    Along axes that become Partial only the rank at coordinate 0 contributes its part.
    """
    (output,), (operand,) = i.outputs, i.reads
    shape = context.local(output)
    box = relative(context.box(operand), context.box(output))
    index = tuple(slice(start, stop) for start, stop in box)
    keeps = _is_first_along_new_axes(i, context)
    (fill,) = {neutral(op, context.type(output).dtype) for op in _new_ops(i, context).values()}

    def term(x: Tensor) -> Tensor:
        filled = torch.full(shape, fill, dtype=x.dtype, device=x.device)
        if keeps:
            filled[index] = x
        return filled

    return _bound_result(i, context, term)


def _new_ops(i: Instruction, context: Context) -> dict[str, str]:
    """Return the reduce op of each axis that becomes Partial."""
    before, after = (context.type(n).layout for n in (*i.reads, *i.outputs))
    assert before is not None and after is not None
    pairs = ((a, before.placement(a), p) for a, p in after.by_axis().items())
    return {a: p.op for a, old, p in pairs if isinstance(p, Partial) and p != old}


def _is_first_along_new_axes(i: Instruction, context: Context) -> bool:
    """Tell whether this rank is at coordinate 0 of each axis that becomes Partial."""
    before, after = (context.type(n).layout for n in (*i.reads, *i.outputs))
    assert before is not None and after is not None
    coordinate = before.mesh.coordinate(context.rank)
    assert coordinate is not None
    old, new = before.by_axis(), after.by_axis()
    changed = [a for a in before.mesh.axes if old[a] != new[a] and str(old[a]) == "R"]
    return all(coordinate[before.mesh.axis_index(a)] == 0 for a in changed)


def _accumulate(i: Instruction, context: Context) -> list[Line]:
    """Add the part of a chunk to the sum in a buffer; the first part is copied there.

    In a unit the first part is added to the neutral element, so that all chunks run one function.
    """
    (output,), (operand,) = i.outputs, i.reads
    layout = context.type(operand).layout
    chunk = layout.stream if layout is not None else None
    assert chunk is not None and chunk.op is not None and isinstance(chunk.index, int)
    lines = [] if context.has_buffer(output) else new_buffer(output, i.order, context)
    target, part = context.ref(output), context.ref(operand)
    done = context.parts.pop(output, frozenset()) | {chunk.index}
    if len(done) < chunk.count:
        context.parts[output] = done
    if len(done) == 1 and (chunk.count == 1 or not context.in_unit):
        return [*lines, Line(run="copy_", args=(target, part))]
    if len(done) == 1:
        start = neutral(chunk.op, context.type(output).dtype)
        lines.append(Line(run="fill_", args=(target, start)))
    return [*lines, Line(run=JOIN[chunk.op], args=(target, part))]


def _written(i: Instruction, context: Context) -> list[Line]:
    """Write the result of each element into the buffer of the result, or into a new one."""
    (output,), (operand,), write = i.outputs, i.reads, INSTRUCTIONS[i.op].write
    assert write is not None
    may = operand == output or not context.share(operand, output)

    def copy(x: Tensor, *, out: Tensor, **attrs: Any) -> None:
        write(x, out=(fresh := torch.empty_like(x)), **attrs)
        out.copy_(fresh)

    lines, kwargs = empty(output, i.order, context), (*i.attrs, ("out", context.ref(output)))
    run = write if may and context.is_on_device(output) else copy
    return [*lines, Line(run=run, args=(context.ref(operand),), kwargs=kwargs, in_place=True)]


#: How parts join, in the buffer of the first one.
JOIN: dict[str, Callable[..., Any] | str] = {
    "lse": attention.join_terms,
    "sum": "add_",
    "prod": "mul_",
    "max": lambda x, part: torch.maximum(x, part, out=x),
    "min": lambda x, part: torch.minimum(x, part, out=x),
}
assert {*JOIN} == {*JOINED}


#: op -> the function that prepares its lines; all others are written by their rows.
_PREPARED: dict[str, Callable[[Instruction, Context], list[Line]]] = {
    "narrow": _narrow,
    "chunk": _narrow,
    "select": _select,
    "unexpand": _unexpand,
    "own": partial(_bound_result, run=itself),
    "pad": _pad,
    "pack": _pack,
    "term": _term,
    "accumulate": _accumulate,
    "addmm": product_steps.added,
    **counted_steps.PREPARED,
}


def prepared(i: Instruction, context: Context) -> list[Line]:
    """Return the lines of an instruction that makes a buffer of others."""
    return _PREPARED.get(i.op, _written)(i, context)
