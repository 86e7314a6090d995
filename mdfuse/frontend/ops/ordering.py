"""Sorted elements along a dim, and their indices.

Both results come from one expression. Along a dim split in equal parts, `topk` first takes the
largest of each part, so that few elements are sent; otherwise every rank gathers the dim.
"""

from __future__ import annotations

from typing import NamedTuple

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import place, record_several, shown


class Ordered(NamedTuple):
    """The results of `topk` and `sort`, as in torch: elements, and their indices."""

    values: Handle
    indices: Handle


def topk(x: Handle, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Ordered:
    """The k largest elements along a dim, or the smallest, and their places; always in order.

    Args:
        x: a tensor.
        k: how many, at most the extent of the dim.
        dim: along which.
        largest: False for the smallest.
        sorted: taken as in torch, which leaves the order open where it is False.
    """
    at, n = place(x, dim), x.shape[dim] if x.ndim else 1
    if not 0 <= k <= n:
        raise DefinitionError(
            f"topk of {shown(x)} along dim {dim} with k={k}",
            because=f"there are {n} elements along that dim",
            hint=f"a k from 0 to {n}",
        )
    return Ordered(*record_several("topk", x, k=k, dim=at, smallest=not largest))


def sort(x: Handle, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Ordered:
    """The elements in order along a dim, and the places where they stood; a NaN is the largest.

    Args:
        x: a tensor.
        dim: along which; it is whole on every rank.
        descending: the largest first.
        stable: equal elements stay in the order in which they stood.
    """
    at = place(x, dim)
    return Ordered(*record_several("sort", x, dim=at, descending=descending, stable=stable))


def argsort(x: Handle, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Handle:
    """The places that put the elements in order along a dim: the indices of `sort`."""
    return sort(x, dim, descending, stable=stable).indices
