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
