"""Windows over the last dims: which rows they read, and what stands around those of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import Shape
from mdfuse.ir.local_attributes import TensorPart
from mdfuse.layouts.boxes import Interval, box_shape
from mdfuse.layouts.halo import Reach

Attrs = Mapping[str, Any]

#: The label of the first dim of places; before it come those of what is not in windows.
FIRST_PLACE = 3


def _window(of: int, stride: int, padding: int, spread: int) -> Reach:
    """Return what windows read, each of so many rows."""
    return Reach(of=of, up=stride, down=1, first=-padding, last=spread - padding)


def _windows_at(of: int, stride: int, padding: int, spread: int) -> Reach:
    """Return the windows that read a row."""
    first = padding - spread + stride
    return Reach(of=of, up=1, down=stride, first=first, last=padding + stride)


def reaches_of(result: Shape, kernel: Shape, attrs: Attrs, at: Sequence[int]) -> dict[Any, Reach]:
    """Return which rows of some operands the places of a result need; {} where a run chooses."""
    if not all(type(n) is int for n in (*result, *kernel)):
        return {}
    of = _windows_at if attrs.get("transposed") else _window
    settings = zip(attrs["stride"], attrs["padding"], attrs["dilation"], strict=True)
    return {
        (operand, len(result) - len(kernel) + d): of(n, s, p, (k - 1) * e + 1)
        for d, (n, k, (s, p, e)) in enumerate(
            zip(result[len(result) - len(kernel) :], kernel, settings, strict=True)
        )
        for operand in at
    }


def labels_of_places(reaches: Mapping[Any, Reach], n: int) -> tuple[int | None, ...]:
    """Return the labels of the dims of places: they may be split where reaches are known."""
    return tuple(FIRST_PLACE + d for d in range(n)) if reaches else (None,) * n


def _edges(
    read: Interval, result: Interval, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[int, int]:
    """Return how many rows are to stand around those that windows of a rank read."""
    rows = (result[1] - result[0] - 1) * stride + (kernel - 1) * dilation + 1
    before = read[0] - result[0] * stride + padding if read[0] < read[1] else 0
    return before, rows - before - (read[1] - read[0])


def _cut(
    read: Interval, result: Interval, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[int, int]:
    """Return how many rows are to stand around those that are spread; below 0: how many go."""
    rows = (read[1] - read[0] - 1) * stride + (kernel - 1) * dilation + 1
    before = read[0] * stride - padding - result[0] if read[0] < read[1] else 0
    return before, result[1] - result[0] - rows - before


def around_of(
    reads: Sequence[Interval], makes: Sequence[Interval], kernel: Shape, attrs: Attrs
) -> tuple[int, ...]:
    """Return the rows around each dim of places on a rank, as (before, behind, before, …)."""
    find = _cut if attrs.get("transposed") else _edges
    settings = zip(attrs["stride"], attrs["padding"], attrs["dilation"], strict=True)
    dims = zip(reads, makes, kernel, settings, strict=True)
    return tuple(e for r, m, k, how in dims for e in find(r, m, k, *how))


def with_rows(x: Tensor, around: Sequence[int], value: Any = 0) -> Tensor:
    """Return a tensor with rows around the last dims, or without some."""
    pairs = [around[i : i + 2] for i in range(0, len(around), 2)]
    flat = [n for pair in reversed(pairs) for n in pair]
    return torch.nn.functional.pad(x, flat, value=value) if any(flat) else x


def local_rows(
    attrs: dict[str, Any], read: TensorPart, result: TensorPart, kernel: Shape
) -> dict[str, Any]:
    """Add the rows around those that this rank reads, unless it has all."""
    n = len(kernel)
    (x, reads), (y, makes) = ((part.shape[-n:], part.box[-n:]) for part in (read, result))
    if (box_shape(reads), box_shape(makes)) == (x, y):
        return attrs
    return {**attrs, "around": around_of(reads, makes, kernel, attrs)}
