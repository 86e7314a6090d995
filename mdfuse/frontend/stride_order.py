"""Stride orders, the frontend's convention: `stride_order[d]` is the place of dim d, 0 the fastest.

The IR says the same with the dims from outermost to innermost.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.errors import DefinitionError, shown


def dims_of(stride_order: int | Sequence[int], ndim: int) -> tuple[int, ...] | None:
    """Return the dims, outermost first; None where the order is no permutation of `ndim` places.

    >>> dims_of((0, 2, 1), 3)
    (1, 2, 0)
    """
    places = _places(stride_order)
    if any(type(p) is not int for p in places) or sorted(places) != list(range(ndim)):
        return None
    return tuple(sorted(range(ndim), key=lambda d: -places[d]))


def _places(stride_order: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(stride_order) if isinstance(stride_order, Sequence) else (stride_order,)


def no_permutation(
    stride_order: int | Sequence[int], ndim: int, of: str, where: Sequence[str]
) -> DefinitionError:
    """Return the error for a stride order that is no permutation."""
    return DefinitionError(
        f"stride_order={shown(_places(stride_order))} of {of}",
        where=where,
        because=f"it is a permutation of 0..{ndim - 1}" if ndim else "there are no dims",
        hint="the place of each dim in memory, 0 the fastest",
    )


def stride_order_of(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the place of each dim, given the dims from outermost to innermost.

    >>> stride_order_of((1, 2, 0))
    (0, 2, 1)
    """
    return tuple(len(dims) - 1 - dims.index(d) for d in range(len(dims)))
