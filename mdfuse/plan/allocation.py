"""Prepare new buffers: their memory, their memory order, and their first values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.symmetric.heap import symmetric_empty
from mdfuse.hir.program import Instruction
from mdfuse.ir.dtype_limits import poison
from mdfuse.ir.infer import dense_strides
from mdfuse.ir.ops import itself
from mdfuse.plan.context import Context
from mdfuse.plan.lines import Line, NewBuffer


def allocate(i: Instruction, context: Context) -> list[Line]:
    """Return the calls of an `alloc`: a new buffer where there is none, and its first values."""
    (output,) = i.outputs
    memory = i.kwargs.get("memory", "device")
    place = next(context.symmetric) if memory == "symmetric" else None
    lines = empty(output, i.order, context, memory, place)
    fill = i.kwargs.get("fill")
    return lines if fill is None else [*lines, Line(run="fill_", args=(context.ref(output), fill))]


def empty(
    output: str,
    order: tuple[int, ...] | None,
    context: Context,
    memory: str = "device",
    place: Tensor | None = None,
) -> list[Line]:
    """Bind a name to a new buffer, unless the name has one; see `new_buffer`."""
    if context.has_buffer(output):
        return []
    return new_buffer(output, order, context, memory, place)


def new_buffer(
    output: str,
    order: tuple[int, ...] | None,
    context: Context,
    memory: str = "device",
    place: Tensor | None = None,
) -> list[Line]:
    """Bind a name to a new buffer, poisoned where the context says so.

    Args:
        output: the name, whose type gives shape and dtype.
        order: the dims from outermost to innermost in memory; None: row-major.
        context: the state at this instruction; it learns the strides.
        memory: "device", "host", "pinned" or "symmetric".
        place: the bytes that hold it in all runs; None: each run makes it.
    """
    shape, dtype = context.local(output), context.type(output).dtype
    strides = dense_strides(shape, order)
    new = NewBuffer(shape=shape, strides=strides, dtype=dtype, device=context.device)
    context.know(output, context.dense(output, order))
    slot = context.slot(output)
    lines = [_make(memory, new, slot) if place is None else _placed(place, new, slot)]
    if context.poison:
        run = _fill_parts if dtype.is_complex else "fill_"
        lines.append(Line(run=run, args=(context.ref(output), poison(dtype))))
    return lines


def _fill_parts(x: Tensor, value: float) -> None:
    """Fill both parts of complex numbers: traced graphs cannot name such a number."""
    torch.view_as_real(x).fill_(value)


def _placed(place: Tensor, new: NewBuffer, slot: int) -> Line:
    """Return the call that binds a buffer which has its place in an arena."""
    buffer = place.view(new.dtype).as_strided(new.shape, new.strides)
    return Line(run=itself, args=(buffer,), into=slot)


def _make(memory: str, new: NewBuffer, slot: int) -> Line:
    """Return the call that makes a buffer; the plan may own those in device memory alone."""
    form, on_gpu = (new.shape, new.strides), new.device.type == "cuda"
    if memory == "symmetric" and not on_gpu:
        return Line(run=symmetric_empty, args=(*form, new.dtype), into=slot)
    is_host = memory in ("host", "pinned")
    kwargs: list[tuple[str, Any]] = [("dtype", new.dtype)]
    kwargs.append(("device", torch.device("cpu") if is_host else new.device))
    if memory == "pinned" and on_gpu:  # memory that a GPU reads directly
        kwargs.append(("pin_memory", True))
    owned = None if is_host else new
    return Line(run=torch.empty_strided, args=form, kwargs=tuple(kwargs), into=slot, new=owned)
