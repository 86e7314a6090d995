"""Shapes, dtypes and memory order of results: torch's own answer, on few elements or on meta."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.caching import Cache
from mdfuse.errors import DefinitionError, Source
from mdfuse.extents.extent import example, is_symbolic, mapped
from mdfuse.ir.graph import Operand, Value
from mdfuse.ir.ops import Op
from mdfuse.ir.shapes import known_shapes, symbolic_shapes

#: What stands for an operand: (dtype, number of dims) of a tensor, or a number.
Sample = tuple[torch.dtype, int] | bool | int | float | None

#: An operand: a value, or what is no tensor.
Given = Any

#: How torch refuses operands.
_REFUSALS = (
    RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError, KeyError,
    OverflowError, ZeroDivisionError,
)  # fmt: skip

#: What torch answered: layers of a model ask the same many times.
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
    strides = _strides(value, value.shape)
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")


def _strides(value: Value, shape: Sequence[int]) -> list[int]:
    """Return the strides of a tensor with some shape that lies as a value does."""
    dense = dense_strides(shape, value.order)
    return [0 if d in value.expanded else stride for d, stride in enumerate(dense)]


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
    """Return torch's results for operands; its refusal becomes a DefinitionError.

    Where a run on few elements tells all but the extents, which the row's rule gives, that is the
    answer. All else, and what is to be refused, is for torch's meta device, whose first op imports
    torch's compiler: 1.5 s in every process.

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
    given = [values[x] if isinstance(x, str) else x for x in inputs]
    metas = told_by_few(op, given, attrs)
    if metas is not None:
        return metas if op.results > 1 else metas[0]
    try:
        return _run_on_meta(op, given, attrs)  # type: ignore[no-any-return]
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


def _run_on_meta(op: Op, given: Sequence[Given], attrs: Mapping[str, Any]) -> Any:
    """Run an op on the meta device.

    It is lenient about dtypes (a matmul of f32 and i64 passes), so where the op takes any shape it
    also runs on a few elements on the CPU.
    """
    operands = [meta_tensor(x) if isinstance(x, Value) else x for x in given]
    if op.is_creation:
        if any(n < 0 for n in attrs["shape"]):  # torch takes some, beside an extent of 0
            raise ValueError(f"negative extents: {tuple(attrs['shape'])}")
        return op.call(*operands, **attrs, device="meta")
    result: Any = (op.meta or op.call)(*operands, **attrs)
    if op.meta is None and not op.is_view and not any("shape" in name for name in attrs):
        few = on_few_elements(op, map(_sample, given), attrs)
        if isinstance(result, Tensor) and few.dtype != result.dtype:
            return result.to(few.dtype)  # the power of a bool by True is no integer in memory
    return result


def told_by_few(
    op: Op, given: Sequence[Given], attrs: Mapping[str, Any]
) -> tuple[Tensor, ...] | None:
    """Return meta tensors like the results, by few elements; None where these do not tell.

    Shapes are the rule's, dtypes those of two elements in each dim, whatever the extents. The order
    of memory is that of a run on operands that lie as these do, of two elements in each dim of
    more: nothing in it depends on how many there are, only on which are one.
    """
    shapes = [x.shape if isinstance(x, Value) and x.is_tensor else None for x in given]
    if not op.is_told_by_few or any(shape and 0 in shape for shape in shapes):
        return None
    wanted = known_shapes(op.shape, shapes, attrs)
    if wanted is None or min(map(min, filter(None, wanted)), default=0) < 0:
        return None
    try:
        kinds = as_results(on_few_elements(op, map(_sample, given), attrs))
        lie = kinds if op.is_plain else as_results(_on_few_lying_as(op, given, attrs))
    except _REFUSALS:
        return None
    metas = []
    for shape, kind, x in zip(wanted, kinds, lie, strict=True):
        if not op.is_plain and [n == 1 for n in shape] != [n == 1 for n in x.shape]:
            return None
        strides = dense_strides(shape) if op.is_plain else _strides_as(x, shape)
        metas.append(torch.empty_strided(shape, strides, dtype=kind.dtype, device="meta"))
    return tuple(metas)


def _strides_as(few: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides of a tensor with some shape that lies as one of few elements does."""
    dims = [(n, stride) for n, stride in zip(shape, few.stride(), strict=True) if n != 1]
    return [
        stride and math.prod(max(n, 1) for n, inner in dims if 0 < inner < stride)
        for stride in few.stride()
    ]


def _sample(x: Given) -> Sample:
    if isinstance(x, Value):
        return (x.dtype, len(x.shape)) if x.is_tensor else scalar_sample(x.dtype)
    number: Sample = x
    return number


def on_few_elements(op: Op, samples: Iterable[Sample], attrs: Mapping[str, Any]) -> Any:
    """Call an op on small tensors of ones, which may be divisors and indices.

    Each dim has two elements, so that shapes fit; attributes of a rank's part are left out.
    """
    ones = (torch.ones((2,) * x[1], dtype=x[0]) if isinstance(x, tuple) else x for x in samples)
    return _called_on_few(op, ones, attrs, keeps_ones=False)


def _on_few_lying_as(op: Op, given: Iterable[Given], attrs: Mapping[str, Any]) -> Any:
    """Call an op on such tensors, which lie as the operands do, and have their dims of one."""
    ones = (_ones_lying_as(x) if isinstance(x, Value) else x for x in given)
    return _called_on_few(op, ones, attrs, keeps_ones=True)


def _ones_lying_as(value: Value) -> Any:
    if not value.is_tensor:
        return scalar_sample(value.dtype)
    shape = [min(n, 2) for n in value.shape]
    ones = torch.ones(math.prod(shape), dtype=value.dtype)
    return ones.as_strided(shape, _strides(value, shape))


def _called_on_few(
    op: Op, operands: Iterable[Any], attrs: Mapping[str, Any], keeps_ones: bool
) -> Any:
    attr_of = {a.name: a for a in op.attrs if not a.is_local}
    few = {k: attr_of[k].for_few(v, keeps_ones) for k, v in attrs.items() if k in attr_of}
    return (op.few or op.call)(*operands, **few)


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
    given = [values[x] if isinstance(x, str) else x for x in inputs]
    tensors = [x if isinstance(x, Value) and x.kind == "tensor" else None for x in given]
    shapes = tuple([x.shape if x is not None else None for x in tensors])
    rows = rows_of(op.name, given)
    counted = {} if rows is None else {"rows": rows}
    if not is_symbolic(shapes) and not is_symbolic((*attrs.values(), *inputs)):
        key = _question(op, given, attrs)
        fields = ANSWERS.find(key)
        if fields is None:
            fields = _answer(op, attrs, infer(op, inputs, attrs, values, source))
            ANSWERS.put(key, fields)
        return tuple([{**x, **counted} for x in fields])
    known = {x: mapped(values[x], example) for x in inputs if isinstance(x, str)}
    numbers = mapped(dict(attrs), example)
    fields = _answer(
        op, attrs, infer(op, mapped(tuple(inputs), example), numbers, known, source, values)
    )
    new_shapes = symbolic_shapes(op.shape, shapes, attrs, tuple(x["shape"] for x in fields))
    pairs = zip(fields, new_shapes, strict=True)
    return tuple({**x, **counted, "shape": shape} for x, shape in pairs)


#: Operations whose result has the rows that their last operand counts, and those on rows whose
#: result has none.
_COUNTED = ("group_rows", "rows_mm", "spread_rows", "mask_rows")
_UNCOUNTED = ("ungroup_rows", "rows_mm_grad", "sum_of_rows")


def rows_of(op: str, given: Sequence[Given]) -> str | None:
    """Return the counts of the rows of an operation's result; None where it is not ragged."""
    values = [x for x in given if isinstance(x, Value)]
    if op in _COUNTED:
        return values[-1].name
    rows = [x.rows for x in values if x.rows is not None]
    return rows[0] if rows and op not in _UNCOUNTED else None


def _question(op: Op, given: Sequence[Given], attrs: Mapping[str, Any]) -> Hashable:
    """Return a key of torch's answer; 1, 1.0 and True are three numbers."""
    operands = tuple([_described(x) for x in given])
    settings = tuple([(k, _typed(v)) for k, v in attrs.items()])
    return op.name, op.call, operands, settings, torch.get_default_dtype()


def _described(x: Given) -> Hashable:
    if not isinstance(x, Value):
        return type(x), x
    return x.kind, x.shape, x.dtype, x.order, x.expanded


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


def as_results(results: Any) -> tuple[Tensor, ...]:
    """Return what a row's call gave as a tuple: most give one tensor."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


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
