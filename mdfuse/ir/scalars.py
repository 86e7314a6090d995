"""Scalars: numbers that every rank has, computed on the host as torch computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dtype_limits import highest, lowest
from mdfuse.ir.tensors import why_not


def scalar_call(call: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Call an op on host numbers, as tensors of no dims on the CPU; return a number."""
    wide = {bool: torch.bool, int: torch.int64, float: torch.float64}
    tensors = [torch.tensor(x, dtype=wide[type(x)], device="cpu") for x in operands]
    return call(*tensors).item()


def as_number(x: Any, dtype: torch.dtype) -> bool | int | float | None:
    """Return x as a host scalar of this dtype; None where x cannot be one."""
    if isinstance(x, Tensor):
        x = x.item() if why_not(x) is None and x.ndim == 0 else None
    if not isinstance(x, bool | int | float):
        return None
    if dtype.is_floating_point or dtype.is_complex:
        return _as_float(x)
    if isinstance(x, float) and not x.is_integer():
        return None
    kind = bool if dtype == torch.bool else int
    return kind(x) if kind(x) == x and lowest(dtype) <= x <= highest(dtype) else None


def _as_float(x: float) -> float | None:
    """Return x as a float; None for an integer that is too large."""
    try:
        return float(x)
    except OverflowError:
        return None
