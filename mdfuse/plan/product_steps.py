"""Prepare products of matrices that are written, or added, into a buffer as they are computed.

| buffer | factors | the call |
|---|---|---|
| any dtype | the same | `mm(out=)`, `addmm_`: the library reads the buffer as it writes there |
| f32 | 16 bits | the same with `out_dtype`, where `adds_wide`: nothing is rounded to 16 bits |
| f32 | 16 bits | elsewhere: the product in 16 bits, which is then added |
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mdfuse.hir.program import Instruction
from mdfuse.ir.infer import dense_strides
from mdfuse.plan.context import Context
from mdfuse.plan.lines import Line, NewBuffer, SlotRef, drop

_MM, _ADDMM = torch.ops.aten.mm, torch.ops.aten.addmm


def added(i: Instruction, context: Context) -> list[Line]:
    """Return the calls that add this rank's product to a buffer, or write it there."""
    *_, a, b = i.inputs
    (output,), is_first = i.outputs, len(i.inputs) == 2
    assert isinstance(a, str) and isinstance(b, str)
    into, left, right = context.local(output), context.local(a), context.local(b)
    if 0 in into or (left[-1] == 0 and not is_first):
        return []
    args = tuple(context.ref(x) for x in (output, a, b))
    if left[-1] == 0:
        return [Line(run="zero_", args=args[:1])]
    narrow, wide = context.type(a).dtype, context.type(output).dtype
    if narrow != wide:
        is_direct = wide == torch.float32 and adds_wide(context.device.type, narrow)
        if is_direct:
            return _wide(args, is_first)
        return _rounded(args, is_first, into, narrow, context)
    if is_first:
        run = torch.mm if len(into) == 2 else torch.matmul
        return [Line(run=run, args=args[1:], kwargs=(("out", args[0]),))]
    if len(into) == 2:
        return [Line(run="addmm_", args=args)]
    return [Line(run=_add_rows if len(right) == 2 else _add_batches, args=args)]


def _wide(args: tuple[SlotRef, ...], is_first: bool) -> list[Line]:
    """Return the call that adds a product of 16 bits to f32."""
    run = _MM.dtype_out if is_first else _ADDMM.dtype_out
    read = args[1:] if is_first else args
    return [Line(run=run, args=(*read, torch.float32), kwargs=(("out", args[0]),))]


def _rounded(
    args: tuple[SlotRef, ...],
    is_first: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    context: Context,
) -> list[Line]:
    """Return the calls that compute a product in the dtype of its factors, and add it."""
    if context.in_unit:  # the unit's other calls are compiled, and the plan has no memory for them
        return [Line(run=_write_rounded if is_first else _add_rounded, args=args)]
    into, *factors = args
    strides, device, part = dense_strides(shape, None), context.device, context.new_slot()
    product = Line(
        run=torch.empty_strided,
        args=(shape, strides),
        kwargs=(("dtype", dtype), ("device", device)),
        into=part,
        new=NewBuffer(shape=shape, strides=strides, dtype=dtype, device=device),
    )
    return [
        product,
        Line(run=torch.matmul, args=tuple(factors), kwargs=(("out", SlotRef(part)),)),
        Line(run="copy_" if is_first else "add_", args=(into, SlotRef(part))),
        drop(part),
    ]


def _write_rounded(into: Tensor, a: Tensor, b: Tensor) -> None:
    into.copy_(torch.matmul(a, b))


def _add_rounded(into: Tensor, a: Tensor, b: Tensor) -> None:
    into.add_(torch.matmul(a, b))


@cache
def adds_wide(device: str, dtype: torch.dtype) -> bool:
    """Return whether this torch adds a product of 16 bits to f32 on a kind of device.

    Torch has had the call since 2.8, on CUDA alone, at first without sums in f32: so it is probed.
    """
    if device != "cuda" or not hasattr(_ADDMM, "dtype_out"):
        return False
    into = torch.zeros(16, 16, device=device)
    a = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        _ADDMM.dtype_out(into, a, a, torch.float32, out=into)
        _MM.dtype_out(a, a, torch.float32, out=into)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _add_rows(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a product of batches with one matrix, of all rows at once where their stride is even."""
    if into.is_contiguous() and a.is_contiguous():
        into.flatten(0, -2).addmm_(a.flatten(0, -2), b)
    else:
        _add_batches(into, a, b)


def _add_batches(into: Tensor, a: Tensor, b: Tensor) -> None:
    a, b = (x.expand(*into.shape[:-2], *x.shape[-2:]) for x in (a, b))
    if into.ndim == 3:
        into.baddbmm_(a, b)
    else:
        for mine, left, right in zip(into, a, b, strict=True):
            _add_batches(mine, left, right)
