"""Python numbers, the range of 64 bits, and short texts of values for messages."""

from __future__ import annotations

import numbers
import sys
from typing import Any

import torch

from mdfuse.errors import shown

#: Integers lie in 64 bits.
LEAST, END = -(1 << 63), 1 << 63


def plain_number(x: Any) -> Any:
    """Return a number of numpy or of an enumeration as a Python number; others unchanged."""
    if isinstance(x, bool):
        return x
    if isinstance(x, numbers.Integral):
        return int(x)
    if isinstance(x, numbers.Real) and hasattr(x, "__float__"):
        return float(x)
    is_bool = type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_")
    return bool(x) if is_bool else x


def is_in_range(x: Any) -> bool:
    """Return whether x is anything but an integer that 64 bits cannot hold."""
    return not isinstance(x, int) or LEAST <= x < END


def is_finite(x: Any) -> bool:
    """Return whether x is a number that a float can be."""
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return is_number and abs(x) <= sys.float_info.max


def brief(x: Any) -> str:
    """Return a short text of a value for messages, however long its own text is."""
    if isinstance(x, int) and not is_in_range(x):
        return f"an integer of {x.bit_length()} bits"
    if isinstance(x, list | tuple):
        parts = [*map(brief, x[:8]), *(["..."] if len(x) > 8 else [])]
        inside = ", ".join(parts)
        return f"[{inside}]" if isinstance(x, list) else f"({inside}{',' * (len(x) == 1)})"
    if isinstance(x, torch.Tensor):
        if x.is_nested:
            return "a nested Tensor"
        return f"a {type(x).__name__} of shape {list(x.shape)}"
    if type(x).__name__ == "ndarray":
        return f"an ndarray of shape {[*x.shape]}"
    return " ".join(shown(x, 80).split("\n"))
