"""Tensors that are known when the program is made, as values that need no input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.frontend import ops as operations

ops: Any = operations

#: The most numbers of a constant in the program.
_FEW = 8


def is_made(x: Tensor) -> bool:
    """Return whether each rank makes a tensor: one number, an arithmetic row, few numbers."""
    return (
        _uniform(x) is not None
        or _steps(x) is not None
        or (x.numel() <= _FEW and not x.is_complex())
    )


def as_value(x: Tensor) -> Any:
    """Return a tensor as a value of the open definition.

    Raises:
        DefinitionError: it has too many numbers to stand in the program.
    """
    number = _uniform(x)
    if number is not None:
        return ops.full(tuple(x.shape), number, dtype=x.dtype)
    steps = _steps(x)
    if steps is not None:
        row = ops.arange(*steps, dtype=x.dtype)
        return row if x.ndim == 1 else ops.reshape(row, tuple(x.shape))
    try:
        return ops.tensor(x)
    except DefinitionError as error:
        raise DefinitionError(
            f"a constant of shape {list(x.shape)}",
            because=error.because,
            hint="make it an input of the module",
        ) from error


def _uniform(x: Tensor) -> Any:
    """Return the number of a uniform tensor; None for an empty one, and for NaN."""
    if not x.numel() or x.is_complex():
        return None
    first = x.reshape(-1)[0]
    return first.item() if bool((x == first).all()) else None


def _steps(x: Tensor) -> tuple[int, int, int] | None:
    """Return start, end and step of integers along the only dim longer than 1."""
    if x.dtype not in (torch.int64, torch.int32) or sum(n != 1 for n in x.shape) != 1:
        return None
    row = x.reshape(-1).long()
    start, step = int(row[0]), int(row[1] - row[0])
    is_regular = step > 0 and bool((row.diff() == step).all())
    return (start, start + step * len(row), step) if is_regular else None
