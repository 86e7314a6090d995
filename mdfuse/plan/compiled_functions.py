"""Compiled functions, as plans call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class WithConstants:
    """A compiled function that reads constants behind its operands; see `lifted_constants`."""

    function: Function
    constants: tuple[torch.Tensor, ...]

    def __call__(self, *operands: Any) -> Any:
        return self.function(*operands, *self.constants)


def parts_of(function: Function) -> tuple[Function, tuple[torch.Tensor, ...]]:
    """Return the compiler's own function, and the constants that it reads."""
    if isinstance(function, WithConstants):
        return function.function, function.constants
    return function, ()


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

    function: Function
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


def emptying(function: Function) -> Function | None:
    """Return a compiled function that takes its operands in a list, which it empties.

    So it frees each of them behind its last use. Torch itself calls it so, in the wrapper that
    takes operands one by one. None: it is no compiled function, or torch wraps it in another way.
    """
    if isinstance(function, AsTold):
        within = emptying(function.function)
        return None if within is None else replace(function, function=within)
    function, constants = parts_of(function)
    if constants:
        taking = emptying(function)
        return None if taking is None else _extended(taking, constants)
    inner = getattr(function, "_compiled_fn", None)
    while inspect.isfunction(inner) and inner.__code__.co_flags & inspect.CO_VARARGS:
        around = inspect.getclosurevars(inner).nonlocals
        if any(isinstance(x, list) and x for x in around.values()):
            return None  # it adds constants to the operands
        inner = getattr(inner, "__wrapped__", around.get("compiled_fn"))
    return inner if getattr(inner, "_boxed_call", False) else None


def _extended(function: Function, constants: tuple[torch.Tensor, ...]) -> Function:
    def extended(operands: list[Any]) -> Any:
        operands.extend(constants)
        return function(operands)

    return extended
