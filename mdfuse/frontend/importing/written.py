"""Functional writes into parts of a value: new values instead of in-place writes.

Export makes these of `x[1:3] = y` and of operations in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle

ops: Any = operations


def fill(x: Handle, value: Any) -> Any:
    """One number in the place of all elements."""
    if isinstance(value, Tensor):
        value = value.item()
    if not isinstance(value, Handle):
        return ops.full_like(x, value)
    return copy(x, value)


def copy(x: Handle, source: Handle) -> Any:
    """The elements of another value, in the shape and the dtype of x."""
    converted = source if source.dtype == x.dtype else ops.cast(source, x.dtype)
    return converted if converted.shape == x.shape else ops.expand(converted, x.shape)


def slice_scatter(
    x: Handle, source: Handle, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """A value with a slice of a dim written."""
    at = dim % x.ndim
    first, last, _ = slice(start, end).indices(x.shape[at])
    last = max(first, last)
    new = _spread(x, source, at, len(range(first, last, step)))
    return ops.slice_scatter(x, new, at, first, last, step)


def select_scatter(x: Handle, source: Handle, dim: int, index: int) -> Any:
    """A value with one place of a dim written."""
    shape = (*x.shape[: dim % x.ndim], *x.shape[dim % x.ndim + 1 :])
    new = source if source.shape == shape else ops.expand(source, shape)
    return ops.select_scatter(x, new, dim, index)


def _spread(x: Handle, source: Handle, dim: int, length: int) -> Any:
    """Expand the source to the written part of x."""
    wanted = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return source if source.shape == wanted else ops.expand(source, wanted)
