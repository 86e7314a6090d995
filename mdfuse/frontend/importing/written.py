"""Functional writes into parts of a value: new values instead of in-place writes.

Export makes these of `x[1:3] = y` and of operations in place.
"""

from __future__ import annotations

import math
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
    if step != 1:
        new = _spread(x, source, at, len(range(first, last, step)))
        return ops.slice_scatter(x, new, at, first, last, step)
    return _between(x, _spread(x, source, at, last - first), at, first, max(first, last))


def select_scatter(x: Handle, source: Handle, dim: int, index: int) -> Any:
    """A value with one place of a dim written."""
    at = dim % x.ndim
    first = index % x.shape[at]
    return _between(x, ops.unsqueeze(source, at), at, first, first + 1)


def _spread(x: Handle, source: Handle, dim: int, length: int) -> Any:
    """Expand the source to the written part of x."""
    wanted = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return source if source.shape == wanted else ops.expand(source, wanted)


def _between(x: Handle, source: Handle, dim: int, first: int, last: int) -> Any:
    source = source if source.dtype == x.dtype else ops.cast(source, x.dtype)
    parts = [source] if math.prod(source.shape) else []
    if first > 0:
        parts.insert(0, ops.narrow(x, dim, 0, first))
    if last < x.shape[dim]:
        parts.append(ops.narrow(x, dim, last, x.shape[dim] - last))
    return parts[0] if len(parts) == 1 else ops.cat(parts, dim)
