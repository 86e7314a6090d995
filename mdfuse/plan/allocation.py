"""New buffers: where they lie, in which memory order, and what is in them at first."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mdfuse.errors import ProgramError
from mdfuse.hir.program import Instruction
from mdfuse.ir.extremes import highest
from mdfuse.ir.infer import dense_strides
from mdfuse.plan.slots import Binding, Context, Slots, Thunk

_Extents = tuple[int, ...]
_Make = Callable[[], Tensor]


def allocate(i: Instruction, context: Context, binding: Binding) -> Thunk:
    """A new buffer; nothing where there is one."""
    (output,) = i.outputs
    memory = i.kwargs.get("memory", "device")
    if memory not in MEMORY:
        raise ProgramError(
            f"%{output} = alloc(memory={memory}): there is no such memory",
            where=context.where(i),
            hint="one of " + ", ".join(MEMORY),
        )
    return empty(output, i.order, context, binding, memory)


def empty(
    output: str,
    order: tuple[int, ...] | None,
    context: Context,
    binding: Binding,
    memory: str = "device",
) -> Thunk:
    """Bind a name to a new buffer, unless it has one."""
    if binding is Binding.BOUND:
        return _nothing
    target = context.slot(output)
    make = _maker(output, order, context, memory)

    def always(s: Slots) -> None:
        s[target] = make()

    def where_there_is_none(s: Slots) -> None:
        if s[target] is None:
            s[target] = make()

    return always if binding is Binding.FRESH else where_there_is_none


def _nothing(s: Slots) -> None:
    """The buffer is there."""


def _maker(output: str, order: tuple[int, ...] | None, context: Context, memory: str) -> _Make:
    shape, dtype = context.local(output), context.type(output).dtype
    make = MEMORY[memory](shape, dense_strides(shape, order), dtype, context.device)
    if not context.poison:
        return make
    poison = math.nan if dtype.is_floating_point else highest(dtype)
    return lambda: make().fill_(poison)


def _on_device(
    shape: _Extents, strides: _Extents, dtype: torch.dtype, device: torch.device
) -> _Make:
    if strides == dense_strides(shape):
        return partial(torch.empty, shape, dtype=dtype, device=device)
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def _on_host(shape: _Extents, strides: _Extents, dtype: torch.dtype, device: torch.device) -> _Make:
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device="cpu")


def _pinned(shape: _Extents, strides: _Extents, dtype: torch.dtype, device: torch.device) -> _Make:
    """Host memory that a GPU reads directly; without a GPU nothing needs it pinned."""
    pin = device.type == "cuda"
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device="cpu", pin_memory=pin)


def _symmetric(
    shape: _Extents, strides: _Extents, dtype: torch.dtype, device: torch.device
) -> _Make:
    """Memory that the other ranks of a host can be given access to; on CPU plain memory."""
    if device.type != "cuda":
        return _on_device(shape, strides, dtype, device)
    from torch.distributed import _symmetric_memory

    size = math.prod(shape)

    def make() -> Tensor:
        return _symmetric_memory.empty(size, dtype=dtype, device=device).as_strided(shape, strides)

    return make


#: Where `alloc` may put a buffer.
MEMORY: dict[str, Callable[[_Extents, _Extents, torch.dtype, torch.device], _Make]] = {
    "device": _on_device,
    "host": _on_host,
    "pinned": _pinned,
    "symmetric": _symmetric,
}
