"""Parts of lookups by tensors of indices."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import indexing, views
from mdfuse.frontend.ops.pointwise import ROWS, cast, where
from mdfuse.frontend.ops.recording import own_place, record, shown

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
    checked = [check_index("x[…]", i, x, first + n, True) for n, i in enumerate(indices)]
    return at_places(x, first, checked)


def at_places(x: Handle, first: int, indices: Sequence[Handle]) -> Handle:
    """`at_indices` of checked indices in 64 bits."""
    count = len(indices)
    extents = x.shape[first : first + count]
    flat = None
    for n, index in zip(extents, indices, strict=True):
        positions = from_the_end(index, n)
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


def first_places(x: Handle, shape: Sequence[int], but: int) -> Handle:
    """Return the first places of each dim except one."""
    window = tuple(
        builtins.slice(None) if d == but or n == x.shape[d] else builtins.slice(0, n)
        for d, n in enumerate(shape)
    )
    is_all = builtins.all(w == builtins.slice(None) for w in window)
    return x if is_all else indexing.index(x, window)


def written_places(x: Handle, dim: int, index: Handle, src: Handle) -> tuple[int, Handle, Handle]:
    """Return the dim counted from the first, the index in 64 bits, and src cut to its shape."""
    at = own_place(x, dim)
    index = check_index("scatter", index, x, at)
    fits = index.ndim == x.ndim == src.ndim and builtins.all(
        n <= k and (d == at or n <= m)
        for d, (n, m, k) in enumerate(zip(index.shape, x.shape, src.shape, strict=True))
    )
    if not fits:
        raise DefinitionError(
            f"scatter of {shown(x)} along dim {dim} with {shown(index)} and {shown(src)}",
            because="an index has the dims of x and src, along no dim more places than src, and "
            "along the others than x",
            hint="expand the index to the shape of src",
        )
    return at, index, first_places(src, index.shape, -1)


def vector_of_places(
    name: str, x: Handle, dim: int, index: Handle, source: Handle
) -> tuple[int, Handle, Handle]:
    """Return the dim counted from the first, a vector of indices in 64 bits, and the source."""
    at = own_place(x, dim)
    index = check_index(name, index, x, at)
    count = index.shape[0] if index.ndim else 1
    wanted = (*x.shape[:at], count, *x.shape[at + 1 :])
    if index.ndim > 1 or source.shape != wanted or source.dtype != x.dtype:
        raise DefinitionError(
            f"{name} of {shown(x)} along dim {dim} with {shown(index)} and {shown(source)}",
            because="the index is a vector; the source has x's dtype and shape, with a place for "
            "each index along the dim",
            hint=f"a source of {list(wanted)}",
        )
    return at, index if index.ndim else views.reshape(index, (1,)), source
