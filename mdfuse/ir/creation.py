"""Tensors made of numbers: each rank makes its own part, from the whole's shape and its box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.layouts.boxes import runs_of, runs_shape

Device = torch.device | str | None
#: The rows of each dim that a part has: the ends of one run, or of several.
Runs = Sequence[Sequence[int]]


def numbers_of(ends: Sequence[int], device: Device = None) -> Tensor:
    """Return the numbers of rows in some runs, by the ends of these."""
    runs = [torch.arange(a, b, dtype=torch.int64, device=device) for a, b in runs_of(ends)]
    return torch.cat(runs) if len(runs) > 1 else runs[0]


def full(
    value: float | int | bool,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    box: Runs | None = None,
    device: Device = None,
) -> Tensor:
    """Make a tensor that is one number everywhere, or a part of it.

    Args:
        value: the number.
        shape: of the whole.
        dtype: of the elements.
        box: the part to make; the whole by default.
        device: where to make it.
    """
    part = tuple(shape) if box is None else runs_shape(box)
    return torch.full(part, value, dtype=dtype, device=device)


def arange(
    start: float | int,
    step: float | int,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    box: Runs | None = None,
    device: Device = None,
) -> Tensor:
    """Make start + i * step for 0 <= i < shape[0]: in integers, or rounded once from f64."""
    index = numbers_of((0, shape[0]) if box is None else box[0], device)
    if isinstance(start, float) or isinstance(step, float):
        index = index.to(torch.float64)
    return (index * step + start).to(dtype)


def constant(
    *,
    values: Sequence[float | int | bool],
    shape: Sequence[int],
    dtype: torch.dtype,
    box: Runs | None = None,
    device: Device = None,
) -> Tensor:
    """Make a tensor of listed numbers, in row-major order."""
    whole = torch.tensor(tuple(values), dtype=dtype, device=device).reshape(tuple(shape))
    if box is None:
        return whole
    for d, ends in enumerate(box):
        whole = whole.index_select(d, numbers_of(ends, device))
    return whole


def full_like(x: Tensor, value: Any, *, dtype: torch.dtype) -> Tensor:
    """Make a tensor of the shape of x that is one number everywhere."""
    return torch.full(x.shape, value, dtype=dtype, device=x.device)
