"""MPI's names for torch's dtypes and reduce ops.

Every type is passed explicitly: MPI takes a wrong guess for narrow floats without an error.
"""

from __future__ import annotations

from typing import Any

import torch

from mdfuse.layouts.reduction import BOOL_OPS

#: Types in which MPI itself reduces; bool does as bytes that hold 0 or 1.
_REDUCIBLE = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "UINT8_T",
}

#: Types for data that is only carried, by bytes per element: MPI counts up to 2^31 elements.
_CARRIED = {1: "BYTE", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}

#: MPI has no average: the sum is divided afterwards.
_OPS = {
    "sum": "SUM",
    "prod": "PROD",
    "min": "MIN",
    "max": "MAX",
    "avg": "SUM",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


def is_reducible(dtype: torch.dtype) -> bool:
    """Return whether MPI reduces this dtype; the others are reduced in their working dtype."""
    return dtype in _REDUCIBLE


def reducing_type(mpi: Any, dtype: torch.dtype) -> Any:
    """Return MPI's type for the elements of a reduction."""
    return getattr(mpi, _REDUCIBLE[dtype])


def carrying_type(mpi: Any, dtype: torch.dtype) -> Any:
    """Return a type of MPI with as many bytes as the dtype, for data that is only carried."""
    return getattr(mpi, _CARRIED[dtype.itemsize])


def reduce_op(mpi: Any, op: str | None, dtype: torch.dtype) -> Any:
    """Return MPI's op for a reduce op; the sum for "avg"."""
    name = op or ""
    return getattr(mpi, _OPS[BOOL_OPS[name] if dtype is torch.bool else name])
