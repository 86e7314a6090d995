"""What lookups by tensors of indices are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import views
from mdfuse.frontend.ops.pointwise import ROWS, cast, where
from mdfuse.frontend.ops.recording import record, shown

_INTEGERS = (torch.int64, torch.int32)


def check_index(name: str, index: Handle) -> Handle:
    """The index in 64 bits."""
    if index.dtype not in _INTEGERS:
        raise DefinitionError(
            f"{name} with the index {shown(index)}",
            because="an index is made of integers of 64 or 32 bits",
            hint="index.long()",
        )
    return index if index.dtype == torch.int64 else cast(index, torch.int64)


def added_up(x: Handle, looked_up: Callable[[Handle], Handle]) -> Handle:
    """A lookup in x; bools, of which ranks add up no parts, as bytes."""
    if x.dtype != torch.bool:
        return looked_up(x)
    return cast(looked_up(cast(x, torch.uint8)), torch.bool)


def at_indices(x: Handle, first: int, indices: Sequence[Handle]) -> Handle:
    """`x[:, i, j]`: dims from `first` on by tensors of indices, which are repeated to one shape.

    Several indices are one into their dims as one; the outermost of these may be split.
    """
    count = len(indices)
    if (count == 1 and indices[0].dtype == torch.bool) or x.ndim < first + count:
        raise no_mask(x)
    extents = x.shape[first : first + count]
    flat = None
    for n, index in zip(extents, indices, strict=True):
        own = from_the_end(check_index("x[…]", index), n)
        flat = own if flat is None else flat * n + own
    assert flat is not None
    if count > 1:
        merged = math.prod(extents)
        x = views.reshape(x, (*x.shape[:first], merged, *x.shape[first + count :]))
    return added_up(x, lambda table: record("index_select", flat, table, along=first))


def from_the_end(index: Handle, n: int) -> Handle:
    return where(ROWS["lt"](index, 0), index + n, index)


def no_mask(x: Handle) -> DefinitionError:
    return DefinitionError(
        f"%{x.name}[mask] of {shown(x)}",
        because="how many elements a mask chooses is known only when the program runs",
        hint="where(mask, x, other) keeps the shape; x[index] takes integers",
    )
