"""The least and the greatest number of a dtype: what min and max start from."""

from __future__ import annotations

import math

import torch


def lowest(dtype: torch.dtype) -> float | int | bool:
    """The identity of max."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """The identity of min."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def poison(dtype: torch.dtype) -> complex | float | int | bool:
    """What shows where it comes through: NaN; integers have none, their greatest number may do."""
    if dtype.is_complex:
        return complex(math.nan, math.nan)
    return math.nan if dtype.is_floating_point else highest(dtype)
