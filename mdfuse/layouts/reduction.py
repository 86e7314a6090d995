"""Reductions across ranks: which ones are allowed, and how one rank computes them by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from mdfuse.errors import CommunicationError, shown

#: What each op becomes on bool, which travels as uint8 holding 0 or 1.
BOOL_OPS = {
    "sum": "max",
    "prod": "min",
    "min": "min",
    "max": "max",
    "band": "min",
    "bor": "max",
    "bxor": "bxor",
}

#: dtype -> the dtype in which its local reduction is done instead: narrow floats are rounded once,
#: at the end, and torch has no reductions on wide unsigned integers, nor on complex numbers of
#: halves.
_WORKING_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.bool: torch.uint8,
}

_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "prod": lambda rows: rows.prod(0, dtype=rows.dtype),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
    "avg": lambda rows: rows.mean(0),
    "band": lambda rows: reduce(torch.bitwise_and, rows.unbind(0)),
    "bor": lambda rows: reduce(torch.bitwise_or, rows.unbind(0)),
    "bxor": lambda rows: reduce(torch.bitwise_xor, rows.unbind(0)),
}

#: The sign of 64 bits: with it flipped, signed integers have the order of unsigned ones.
_TOP_BIT = -(2**63)

_ORDERED = frozenset({"min", "max"})
_BITWISE = frozenset({"band", "bor", "bxor"})
_ON_FLOATS = frozenset(_COMBINE) - _BITWISE


def check_reduction(op: str | None, dtype: torch.dtype) -> None:
    """Refuse a reduce op that has no meaning on `dtype`.

    Raises:
        CommunicationError: an unknown op, `avg` of integers, bits of floats, or an order of complex
            numbers.
    """
    if op not in _COMBINE:
        raise CommunicationError(
            f"reduce op {shown(op)} is unknown", because=f"reduce ops are {', '.join(_COMBINE)}"
        )
    if op not in _allowed(dtype):
        raise CommunicationError(
            f"{op} of {str(dtype).removeprefix('torch.')} values across ranks is not defined",
            because="sum, prod, min and max are of numbers, avg of floats, band, bor and bxor of "
            "integers and bool",
            hint="cast before the reduction",
        )


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are reduced, to be rounded once, at the end.

    >>> working_dtype(torch.bfloat16), working_dtype(torch.complex32), working_dtype(torch.int8)
    (torch.float32, torch.complex64, torch.int8)
    """
    return _WORKING_DTYPES.get(dtype, dtype)


def combine(op: str, rows: Tensor) -> Tensor:
    """Reduce `rows` [n, k], one row per rank, to [k] of the same dtype.

    >>> combine("max", torch.tensor([[1, 5], [2, 3]]))
    tensor([2, 5])
    """
    if rows.dtype is torch.bool:
        op = BOOL_OPS[op]
    if rows.dtype is torch.uint64 and op in _ORDERED:
        return (_COMBINE[op](rows.view(torch.int64) ^ _TOP_BIT) ^ _TOP_BIT).view(torch.uint64)
    working = rows.to(working_dtype(rows.dtype))
    return _COMBINE[op](working).to(rows.dtype)


#: Floats that torch adds in f32, and rounds once: what their working dtype gives.
_ADDED = frozenset({torch.float16, torch.bfloat16})


def combine_into(op: str, rows: Tensor, into: Tensor) -> None:
    """Reduce `rows` [n, k] to `into` [k], which has the same bits as `combine` gives.

    A sum of two rows is one kernel, without rows in between.
    """
    is_plain = rows.dtype not in _WORKING_DTYPES or rows.dtype in _ADDED
    if op == "sum" and len(rows) == 2 and is_plain:
        torch.add(rows[0], rows[1], out=into)
    else:
        into.copy_(combine(op, rows))


def _allowed(dtype: torch.dtype) -> frozenset[str]:
    """Return the reduce ops that are defined on a dtype."""
    if dtype.is_floating_point:
        return _ON_FLOATS
    if dtype.is_complex:
        return _ON_FLOATS - _ORDERED
    return frozenset(_COMBINE) - {"avg"}
