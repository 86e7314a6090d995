"""Compiled functions whose results have the strides and dtypes that were traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class AsTold:
    """A compiled function whose results have the strides and dtypes that tracing told.

    On GPUs the compiler pads products where that is faster, and returns a view without the padding.
    Its rows are then further apart than traced, and a user of addresses, such as a post, would read
    the padding. It returns `any` of uint8 in bool, where torch returns uint8.

    Attributes:
        function: returns one tensor for each of `strides`.
        strides: of each result; those of dims of one element mean nothing.
        dtypes: of each result.
    """

    function: Callable[..., Any]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        results = self.function(*operands)
        return [
            x if x.stride() == strides and x.dtype is dtype else _in_form(x, strides, dtype)
            for x, strides, dtype in zip(results, self.strides, self.dtypes, strict=True)
        ]


def _in_form(x: torch.Tensor, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return elements at these strides, copied where any lies elsewhere or has another dtype."""
    pairs = zip(x.shape, x.stride(), strides, strict=True)
    is_there = x.numel() == 0 or all(n == 1 or is_ == wanted for n, is_, wanted in pairs)
    if is_there and x.dtype is dtype:
        return x
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device).copy_(x)
