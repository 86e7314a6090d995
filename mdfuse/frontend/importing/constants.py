"""Tensors that are known when the program is made, as values that need no input."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mdfuse.errors import DefinitionError
from mdfuse.frontend import ops as operations

ops: Any = operations

Answer = TypeVar("Answer")

#: The most numbers of a constant in the program.
_FEW = 8

#: Numbers of a tensor that are compared before all of them are.
_LOOKED_AT = 64

#: Bytes of a number -> integers of as many; bits are compared, so that 0.0 is not -0.0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def asked_once(question: Callable[..., Answer]) -> Callable[..., Answer]:
    """Remember the answers to a question about a tensor while it lives and is not written."""
    known: Any = WeakTensorKeyDictionary()

    @wraps(question)
    def ask(x: Any, *others: Hashable) -> Answer:
        if not isinstance(x, Tensor):
            return question(x, *others)
        answers: dict[Any, Answer] = known.setdefault(x, {})
        key = 0 if x.is_inference() else x._version, *others
        if key not in answers:
            answers[key] = question(x, *others)
        return answers[key]

    return ask


class Distinct:
    """Tensors, of which equal ones are represented by the first."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[Tensor]] = {}

    def first(self, x: Tensor, *others: Hashable) -> Tensor:
        """Return the first tensor with the bits of x, passed with the same other values."""
        if x.is_complex() or x.layout != torch.strided or x.element_size() not in _BITS:
            return x
        bits = x.view(_BITS[x.element_size()])
        key = x.dtype, tuple(x.shape), _sample(bits), *others
        same = self._seen.setdefault(key, [])
        for y in same:
            if x is y or torch.equal(bits, y.view(bits.dtype)):
                return y
        same.append(x)
        return x


def _sample(bits: Tensor) -> tuple[int, ...]:
    """Return a few numbers of a tensor, spread over all dims."""
    count = bits.numel()
    if not count:
        return ()
    places = torch.arange(min(count, _LOOKED_AT)) * count // min(count, _LOOKED_AT)
    return tuple(bits[torch.unravel_index(places, bits.shape)].tolist() if bits.ndim else [])


def without_repeats(x: Tensor) -> Tensor:
    """Return a tensor whose expanded dims have the extent 1."""
    for d, (n, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        x = x.narrow(d, 0, 1) if n > 1 and not stride else x
    return x


@asked_once
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
    x = without_repeats(x)
    first = x[(0,) * x.ndim]
    return first.item() if bool((x == first).all()) else None


def _steps(x: Tensor) -> tuple[int, int, int] | None:
    """Return start, end and step of integers along the only dim longer than 1."""
    if x.dtype not in (torch.int64, torch.int32) or sum(n != 1 for n in x.shape) != 1:
        return None
    row = x.reshape(-1).long()
    start, step = int(row[0]), int(row[1] - row[0])
    is_regular = step > 0 and bool((row.diff() == step).all())
    return (start, start + step * len(row), step) if is_regular else None
