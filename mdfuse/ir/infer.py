"""Shapes, dtypes and memory order of results: torch's own answer, on the meta device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.caching import Cache
from mdfuse.errors import DefinitionError, Source
from mdfuse.extents.extent import example, is_symbolic, mapped
from mdfuse.ir.graph import Operand, Value
from mdfuse.ir.ops import Op
from mdfuse.ir.shapes import symbolic_shapes

#: What stands for an operand: (dtype, number of dims) of a tensor, or a number.
Sample = tuple[torch.dtype, int] | bool | int | float | None

#: How torch refuses operands.
_REFUSALS = (
    RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError, KeyError,
    OverflowError, ZeroDivisionError,
)  # fmt: skip

_SCALARS: dict[torch.dtype, Any] = {torch.bool: True}

#: What torch answered: layers of a model ask the same many times, and an answer takes it 0.2 ms.
ANSWERS: Cache[tuple[dict[str, Any], ...]] = Cache(limit=16384)


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dims lie in `order`, outermost first.

    >>> dense_strides((3, 4, 5), (1, 0, 2))
    (5, 15, 1)
    """
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def meta_tensor(value: Value) -> Any:
    """Return a meta tensor with the shape and strides of a value; for a host scalar, a number."""
    if not value.is_tensor:
        return scalar_sample(value.dtype)
    strides = [
        0 if d in value.expanded else s
        for d, s in enumerate(dense_strides(value.shape, value.order))
    ]
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")


def scalar_sample(dtype: torch.dtype) -> bool | int | float:
    """Return a number of the kind that a host scalar of this dtype is."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def infer(
    op: Op,
    inputs: Sequence[Operand],
    attrs: Mapping[str, Any],
    values: Mapping[str, Value],
    source: Source | None,
    shown: Mapping[str, Value] | None = None,
) -> Tensor | tuple[Tensor, ...] | bool | int | float:
    """Run an op on the meta device; what torch refuses is a DefinitionError.

    The meta device is lenient about dtypes (a matmul of f32 and i64 passes), so where the op takes
    any shape it also runs on a few elements on the CPU.

    Args:
        op: the row of the op table.
        inputs: names of values, and numbers.
        attrs: of the op.
        values: what the names stand for.
        source: the user's line.
        shown: the values as an error shows them, where they are others.

    Returns:
        A meta tensor with the result's shape, dtype and strides, a tuple of them for a row with
        several results; a number where every operand is a number.
    """
    try:
        operands = [meta_tensor(values[x]) if isinstance(x, str) else x for x in inputs]
        if op.is_creation:
            if any(n < 0 for n in attrs["shape"]):  # torch takes some, beside an extent of 0
                raise ValueError(f"negative extents: {tuple(attrs['shape'])}")
            return op.call(*operands, **attrs, device="meta")  # type: ignore[no-any-return]
        result: Any = (op.meta or op.call)(*operands, **attrs)
        if op.meta is None and not op.is_view and not any("shape" in name for name in attrs):
            few = on_few_elements(op, map(_sample, operands), attrs)
            if isinstance(result, Tensor) and few.dtype != result.dtype:
                return result.to(few.dtype)  # the power of a bool by True is no integer in memory
        return result  # type: ignore[no-any-return]
    except _REFUSALS as error:
        shown = shown or values
        described = ", ".join(
            f"%{x}: {shown[x].type_text()}" if isinstance(x, str) else str(x) for x in inputs
        )
        settings = ", ".join(f"{k}={v}" for k, v in attrs.items())
        said, whose = ("", "its call") if op.meta is not None else ("torch says: ", "torch")
        raise DefinitionError(
            f"{op.name}({described}{', ' if settings else ''}{settings}) means nothing",
            where=source.quote() if source else (),
            because=f"{said}{[*str(error).strip().splitlines(), type(error).__name__][0]}",
            hint=f"shapes, dtypes and arguments that {whose} takes for {op.name}",
        ) from error


def _sample(operand: Any) -> Sample:
    return (operand.dtype, operand.ndim) if isinstance(operand, Tensor) else operand


def on_few_elements(op: Op, samples: Iterable[Sample], attrs: Mapping[str, Any]) -> Any:
    """Call an op on small tensors of ones, which may be divisors and indices.

    Each dim has two elements, so that shapes fit; attributes of a rank's part are left out.
    """
    few: dict[str, Any] = {a.name: a for a in op.attrs if not a.is_local}
    few = {k: few[k].for_few(v) for k, v in attrs.items() if k in few}
    ones = (torch.ones((2,) * x[1], dtype=x[0]) if isinstance(x, tuple) else x for x in samples)
    return (op.few or op.call)(*ones, **few)


def inferred(
    op: Op,
    inputs: Sequence[Operand],
    attrs: Mapping[str, Any],
    values: Mapping[str, Value],
    source: Source | None,
) -> tuple[dict[str, Any], ...]:
    """Return shape, dtype, memory order and expanded dims of each result: fields of `Value`.

    The order that `stride_order` asks for is the user's; all others are the op's own.
    """
    shapes = tuple(
        values[x].shape if isinstance(x, str) and values[x].is_tensor else None for x in inputs
    )
    if not is_symbolic(shapes) and not is_symbolic((*attrs.values(), *inputs)):
        key = _question(op, inputs, attrs, values)
        found = ANSWERS.find(key)
        if found is None:
            found = _answer(op, attrs, infer(op, inputs, attrs, values, source))
            ANSWERS.put(key, found)
        return tuple(map(dict, found))
    known = {x: mapped(values[x], example) for x in inputs if isinstance(x, str)}
    numbers = mapped(dict(attrs), example)
    found = _answer(
        op, attrs, infer(op, mapped(tuple(inputs), example), numbers, known, source, values)
    )
    made = symbolic_shapes(op.shape, shapes, attrs, tuple(x["shape"] for x in found))
    return tuple({**x, "shape": shape} for x, shape in zip(found, made, strict=True))


def _question(
    op: Op, inputs: Sequence[Operand], attrs: Mapping[str, Any], values: Mapping[str, Value]
) -> Hashable:
    """Return all that torch's answer depends on; 1, 1.0 and True are three numbers."""
    operands = tuple(_described(values[x]) if isinstance(x, str) else (type(x), x) for x in inputs)
    settings = tuple((k, _typed(v)) for k, v in attrs.items())
    return op.name, op.call, operands, settings, torch.get_default_dtype()


def _described(value: Value) -> Hashable:
    return value.kind, value.shape, value.dtype, value.order, value.expanded


def _typed(x: Any) -> Hashable:
    return tuple(map(_typed, x)) if isinstance(x, tuple | list) else (type(x), x)


def _answer(op: Op, attrs: Mapping[str, Any], results: Any) -> tuple[dict[str, Any], ...]:
    """Return fields of `Value` for each result of `infer`."""
    required = tuple(attrs["order"]) if op.name == "stride_order" else None
    return tuple(
        {
            "shape": tuple(x.shape),
            "dtype": x.dtype,
            "order": memory_order(x.stride()) if required is None else required,
            "order_from": "op" if required is None else "user",
            "expanded": expanded_dims(x),
        }
        for x in as_results(results)
    )


def as_results(made: Any) -> tuple[Tensor, ...]:
    """Return what a row's call gave as a tuple: most give one tensor."""
    return (made,) if isinstance(made, Tensor) else tuple(made)


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dims from outermost to innermost in memory.

    >>> memory_order((1, 4, 4))
    (1, 2, 0)
    """
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def expanded_dims(x: Tensor) -> frozenset[int]:
    """Return the dims of extent > 1 along which all elements are one in memory."""
    return frozenset(
        d for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True)) if s == 0 and n > 1
    )
