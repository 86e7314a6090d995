"""Stride orders, the frontend's convention: `stride_order[d]` is the place of dim d, 0 the fastest.

The IR says the same with the dims from outermost to innermost.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.errors import DefinitionError


def dims_of(
    stride_order: Sequence[int], rank: int, of: str, where: Sequence[str]
) -> tuple[int, ...]:
    """The dims from outermost to innermost.

    Args:
        stride_order: the place of each dim in memory.
        rank: how many dims there are.
        of: what it is required of, for the error.
        where: the user's lines, for the error.

    Raises:
        DefinitionError: it is no permutation.

    >>> dims_of((0, 2, 1), 3, "%x", [])
    (1, 2, 0)
    """
    places = tuple(stride_order) if isinstance(stride_order, Sequence) else (stride_order,)
    if any(type(p) is not int for p in places) or sorted(places) != list(range(rank)):
        raise DefinitionError(
            f"stride_order={places} of {of}",
            where=where,
            because=f"it is a permutation of 0..{rank - 1}" if rank else "there are no dims",
            hint="the place of each dim in memory, 0 the fastest",
        )
    return tuple(sorted(range(rank), key=lambda d: -places[d]))


def stride_order_of(dims: Sequence[int]) -> tuple[int, ...]:
    """The place of each dim, of the dims from outermost to innermost.

    >>> stride_order_of((1, 2, 0))
    (0, 2, 1)
    """
    return tuple(len(dims) - 1 - dims.index(d) for d in range(len(dims)))
