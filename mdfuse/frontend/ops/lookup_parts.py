"""Parts of lookups by tensors of indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import views
from mdfuse.frontend.ops.pointwise import ROWS, cast, where
from mdfuse.frontend.ops.recording import record, shown

_INTEGERS = (torch.int64, torch.int32)


def check_index(name: str, index: Handle, x: Handle, dim: int, from_end: bool = False) -> Handle:
    """Return the index in 64 bits; check the numbers of a constant against the dim of x.

    Args:
        name: of the operation.
        index: the index.
        x: the indexed value.
        dim: along which.
        from_end: negative numbers count from the end.
    """
    if index.dtype not in _INTEGERS:
        raise DefinitionError(
            f"{name} with the index {shown(index)}",
            because="an index is made of integers of 64 or 32 bits",
            hint="index.long()",
        )
    check_places(name, index, x, dim, from_end)
    return index if index.dtype == torch.int64 else cast(index, torch.int64)


def check_places(name: str, index: Handle, x: Handle, dim: int, from_end: bool = False) -> None:
    """Raise DefinitionError if a constant has an index out of range; see `check_index`."""
    extent = x.shape[dim] if x.ndim else 1
    numbers = index.definition.numbers.get(index.id)
    if numbers is not None and numbers.numel() and not isinstance(extent, Extent):
        least = -extent if from_end else 0
        wrong = numbers[(numbers < least) | (numbers >= extent)]
        if wrong.numel():
            raise DefinitionError(
                f"{name}: index {int(wrong[0])} is out of range for dim {dim} of {shown(x)}",
                because=f"its indices go from {least} to {extent - 1}" if extent else "it has none",
                hint="an index that is there",
            )


def added_up(x: Handle, looked_up: Callable[[Handle], Handle]) -> Handle:
    """Look up in x; bools as bytes, because ranks add partial results."""
    if x.dtype != torch.bool:
        return looked_up(x)
    return cast(looked_up(cast(x, torch.uint8)), torch.bool)


def at_indices(x: Handle, first: int, indices: Sequence[Handle]) -> Handle:
    """`x[:, i, j]`: dims from `first` on by tensors of indices, which are repeated to one shape.

    Several indices become one index into the merged dims; the outermost dim may be split.
    """
    count = len(indices)
    if (count == 1 and indices[0].dtype == torch.bool) or x.ndim < first + count:
        raise no_mask(x)
    extents = x.shape[first : first + count]
    flat = None
    for dim, (n, index) in enumerate(zip(extents, indices, strict=True), first):
        positions = from_the_end(check_index("x[…]", index, x, dim, from_end=True), n)
        flat = positions if flat is None else flat * n + positions
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
