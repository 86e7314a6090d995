"""Prepared rows of the op table, on this rank's parts.

Where the result has no buffer yet, it is bound; where it has one (preallocated, or a slice of a
larger one), it is written there, in place where torch can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import ProgramError
from mdfuse.hir.program import Instruction
from mdfuse.ir import ops
from mdfuse.ir.graph import Operand
from mdfuse.ir.infer import dense_strides
from mdfuse.plan.allocation import empty
from mdfuse.plan.slots import Binding, Context, Slots, Thunk, base_name, described

#: Ops that read and write element by element: their result may take the place of an operand.
_ELEMENTWISE = ("unary", "binary", "where")

Get = Sequence[tuple[bool, Any]]


def compute(i: Instruction, context: Context, binding: Binding) -> Thunk:
    """A row of the op table on this rank's parts."""
    row = ops.TABLE[i.fn]
    (output,) = i.outputs
    target, shape = context.slot(output), context.local(output)
    get = _getters(i.inputs, context)
    if context.type(output).layout is None:
        return _scalar(i, row, get, target)
    if math.prod(shape) == 0:
        return empty(output, i.order, context, binding)
    attrs = dict(i.attrs)
    if row.name == "permute":
        _check_permutation(i, context, len(shape))
    if row.name == "uniform":
        attrs["device"] = context.device
    bind = ordered(i, context, _bound(_with(row.call, attrs), get, target))
    if binding is Binding.FRESH:
        return bind
    return bind_or_write(binding, target, bind, _written(i, attrs, get, context))


def _check_permutation(i: Instruction, context: Context, ndim: int) -> None:
    dims = i.kwargs["dims"]
    if sorted(d % ndim for d in dims) != list(range(ndim)) or not all(-ndim <= d for d in dims):
        raise ProgramError(
            f"{described(i)}: dims {list(dims)} are no permutation of the dims of "
            f"%{base_name(i.reads[0])}",
            where=context.where(i),
            because=f"a permutation names each of the dims 0 to {ndim - 1} once",
        )


def _with(call: Callable[..., Any], attrs: dict[str, Any]) -> Callable[..., Any]:
    return partial(call, **attrs) if attrs else call


def bind_or_write(binding: Binding, target: int, bind: Thunk, write: Thunk) -> Thunk:
    """Write where there is a buffer, else bind."""
    if binding is not Binding.MAYBE:
        return bind if binding is Binding.FRESH else write

    def thunk(s: Slots) -> None:
        if s[target] is None:
            bind(s)
        else:
            write(s)

    return thunk


def _bound(call: Callable[..., Any], get: Get, target: int) -> Thunk:
    match get:
        case [(True, a)]:

            def unary(s: Slots) -> None:
                s[target] = call(s[a])

            return unary
        case [(True, a), (True, b)]:

            def binary(s: Slots) -> None:
                s[target] = call(s[a], s[b])

            return binary

    operands = _operands(get)

    def general(s: Slots) -> None:
        s[target] = call(*operands(s))

    return general


def _getters(inputs: Sequence[Operand], context: Context) -> Get:
    """Per operand: (True, its slot) or (False, the number)."""
    return [(True, context.slot(x)) if isinstance(x, str) else (False, x) for x in inputs]


def _operands(get: Get) -> Callable[[Slots], Sequence[Any]]:
    """What to call an op with, from the slots."""
    if len(get) > 1 and all(is_slot for is_slot, _ in get):
        return itemgetter(*(x for _, x in get))
    return lambda s: [s[x] if is_slot else x for is_slot, x in get]


# -- results that have a buffer ------------------------------------------------------------------


def _written(i: Instruction, attrs: dict[str, Any], get: Get, context: Context) -> Thunk:
    """The result in the target's buffer."""
    row, (output,) = ops.TABLE[i.fn], i.outputs
    target, operands, overlaps = context.slot(output), _operands(get), _overlaps(i, context)
    may = not overlaps and _is_tensor(i.inputs[0], context) and context.is_on_device(output)
    if row.out is not None and may:
        out = _with(row.out, attrs)

        def in_place(s: Slots) -> None:
            out(*operands(s), out=s[target])

        return in_place
    call = _with(row.call, attrs)

    def copied(s: Slots) -> None:
        s[target].copy_(call(*operands(s)))

    def copied_from_itself(s: Slots) -> None:
        s[target].copy_(call(*operands(s)).clone())

    return copied_from_itself if overlaps and row.is_view else copied


def _is_tensor(x: Operand, context: Context) -> bool:
    return isinstance(x, str) and context.type(x).layout is not None


def _overlaps(i: Instruction, context: Context) -> bool:
    """An operand that is still read may be overwritten meanwhile."""
    (output,) = i.outputs
    sharing = [x for x in i.reads if context.share(x, output)]
    if i.op in _ELEMENTWISE:
        sharing = [x for x in sharing if x != output]
    return bool(sharing)


# -- memory order --------------------------------------------------------------------------------


def ordered(i: Instruction, context: Context, plain: Thunk) -> Thunk:
    """Make the result dense in the order asked for; free where it lies so already.

    Where what it would share memory with is written again, it is a copy always.
    """
    if i.order is None:
        return plain
    (output,) = i.outputs
    target, shape = context.slot(output), context.local(output)
    strides = dense_strides(shape, i.order)
    arrange = _copied if output in context.updated else _in_order

    def thunk(s: Slots) -> None:
        plain(s)
        s[target] = arrange(s[target], shape, strides)

    return thunk


def _copied(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _in_order(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The tensor itself where it has these strides, else a copy that has."""
    if x.stride() == strides:
        return x
    if all(n <= 1 or s == t for n, s, t in zip(shape, x.stride(), strides, strict=True)):
        return x.as_strided(shape, strides)
    return _copied(x, shape, strides)


# -- numbers -------------------------------------------------------------------------------------


def _scalar(i: Instruction, row: ops.Op, get: Get, target: int) -> Thunk:
    """An op on numbers only: torch computes it on the CPU, in the widest type of its kind."""
    call, operands = partial(row.call, **dict(i.attrs)), _operands(get)

    def thunk(s: Slots) -> None:
        s[target] = scalar_call(call, operands(s))

    return thunk


def scalar_call(call: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Call an op on numbers; returns a number."""
    wide = {bool: torch.bool, int: torch.int64, float: torch.float64}
    tensors = [torch.tensor(x, dtype=wide[type(x)]) for x in operands]
    return call(*tensors).item()


def as_number(x: Any, dtype: torch.dtype) -> bool | int | float | None:
    """A number of the kind that a host scalar of this dtype is; None where x cannot be one."""
    x = x.item() if isinstance(x, Tensor) and x.ndim == 0 else x
    if not isinstance(x, bool | int | float):
        return None
    if dtype.is_floating_point:
        return float(x)
    if isinstance(x, float) and not x.is_integer():
        return None
    kind = bool if dtype == torch.bool else int
    return kind(x) if kind(x) == x else None
