"""The least and the greatest number of each dtype, and which numbers it holds."""

from __future__ import annotations

import math
from typing import Any

import torch

#: Floats whose extremes are finite.
_WITHOUT_INF = (
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


def is_number_of(x: Any, dtype: torch.dtype) -> bool:
    """Return whether a tensor of the dtype may be filled with x; False and True are 0 and 1."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return True
    limits = torch.iinfo(dtype) if dtype != torch.bool else None
    least, greatest = (limits.min, limits.max) if limits is not None else (0, 1)
    return isinstance(x, int) and least <= x <= greatest


def lowest(dtype: torch.dtype) -> float | int | bool:
    """Return the least number of a dtype, -inf for floats: the identity of max."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """Return the greatest number of a dtype, inf for floats: the identity of min."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def neutral(op: str, dtype: torch.dtype) -> complex | float | int | bool:
    """Return the number that a reduce op leaves others as they are with; avg has none.

    >>> neutral("max", torch.int8), neutral("prod", torch.float32), neutral("band", torch.uint8)
    (-128, 1, 255)
    """
    if op in ("sum", "bor", "bxor"):
        return 0
    if op == "band":
        return highest(dtype) if dtype == torch.bool or not dtype.is_signed else -1
    if op == "prod":
        return 1
    if dtype in _WITHOUT_INF:
        return getattr(torch.finfo(dtype), "max" if op == "min" else "min")  # type: ignore[no-any-return]
    return highest(dtype) if op == "min" else lowest(dtype)


def poison(dtype: torch.dtype) -> float | int | bool:
    """Return a number that shows in results: NaN; for integers, their greatest number."""
    is_nan = dtype.is_floating_point or dtype.is_complex
    return math.nan if is_nan else highest(dtype)
