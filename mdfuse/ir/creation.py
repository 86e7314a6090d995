"""Tensors made of numbers: each rank makes its own part, from the whole's shape and its box.

Random numbers depend on (seed, stream, global index) alone, hence on no mesh.
"""

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


# -- random numbers --------------------------------------------------------------------------------


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

#: How many random bits fill the mantissa of a dtype without rounding up to 1.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(
    seed: int,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    stream: int,
    low: float = 0.0,
    high: float = 1.0,
    box: Runs | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform numbers in [low, high): element i of a tensor of `shape` is a hash of its index.

    The hash is SplitMix64 (Steele, Lea, Flood 2014) of `index + constant * (seed, stream)`.

    Args:
        seed: an integer.
        shape: the global shape.
        dtype: a floating dtype.
        stream: a number that keeps draws with one seed apart.
        low: lower bound.
        high: upper bound.
        box: the part to make; the whole by default.
        device: where to make it.
    """
    index = _global_index(shape, box, device)
    key = int(seed) * 0x632BE59BD9B4E019 + stream * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D
    state = index * _GOLDEN + _signed(key)
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    state = state ^ _shift(state, 31)
    bits = _BITS[dtype]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    unit = _shift(state, 64 - bits).to(wide) * 2.0**-bits
    return (unit * (high - low) + low).to(dtype)


def dropout(
    x: Tensor,
    seed: int,
    *,
    p: float,
    stream: int,
    shape: Sequence[int] | None = None,
    box: Runs | None = None,
) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p)."""
    if p >= 1.0:
        return torch.zeros_like(x)
    shape = tuple(x.shape) if shape is None else shape
    draw = uniform(seed, shape=shape, dtype=torch.float32, stream=stream, box=box, device=x.device)
    return torch.where(draw >= p, x * (1.0 / (1.0 - p)), torch.zeros_like(x))


def _global_index(
    shape: Sequence[int], box: Runs | None, device: torch.device | str | None
) -> Tensor:
    """Return the row-major index in the whole tensor of each element of a box of it."""
    box = tuple((0, n) for n in shape) if box is None else box
    index = torch.zeros((), dtype=torch.int64, device=device)
    for ends, extent in zip(box, shape, strict=True):
        index = (index * extent).unsqueeze(-1) + numbers_of(ends, device)
    return index


def _shift(x: Tensor, n: int) -> Tensor:
    """Shift to the right, filling with zeros; torch's own shift copies the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _signed(x: int) -> int:
    """Return the 64-bit signed integer with the low bits of x."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x
