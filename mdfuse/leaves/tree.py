"""Reductions in the order of a fixed binary tree, whichever rank has which of the terms.

The tree over n terms halves them: (((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))). A rank adds up the
largest subtrees of which it has all terms, so few numbers travel; those who get them add the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from mdfuse.layouts.reduction import combine, working_dtype

#: A subtree: its first term, and the one behind its last.
Span = tuple[int, int]


def halves(span: Span) -> tuple[Span, Span]:
    """Return the subtrees of a subtree of several terms: the first one is full.

    >>> halves((0, 8)), halves((0, 5))
    (((0, 4), (4, 8)), ((0, 4), (4, 5)))
    """
    start, stop = span
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return (start, middle), (middle, stop)


def subtrees(held: Collection[int], count: int) -> list[Span]:
    """Return the largest subtrees of a tree over `count` terms that consist of held terms.

    >>> subtrees({3, 4, 5}, 8)
    [(3, 4), (4, 6)]
    """

    def inside(span: Span) -> list[Span]:
        count_held = sum(term in held for term in range(*span))
        if count_held == span[1] - span[0]:
            return [span]
        return [s for half in halves(span) for s in inside(half)] if count_held else []

    return inside((0, count)) if count else []


def reduced(op: str, span: Span, at: Callable[[Span], Tensor | None]) -> Tensor:
    """Return a subtree reduced: `at` returns what is known of one, all single terms at least."""
    known = at(span)
    if known is not None:
        return known
    first, second = halves(span)
    return _pair(op, reduced(op, first, at), reduced(op, second, at))


def total(op: str, count: int, known: Mapping[Span, Tensor]) -> Tensor:
    """Return a tree reduced, in the working dtype; an average is divided once, at the end."""
    whole = reduced(op, (0, count), known.get)
    return whole / count if op == "avg" else whole


def term(x: Tensor) -> Tensor:
    """Return a term in the dtype in which it is added: of narrow floats f32, rounded at the end."""
    return x if x.dtype is torch.bool else x.to(working_dtype(x.dtype))


def _pair(op: str, a: Tensor, b: Tensor) -> Tensor:
    if op in ("sum", "avg") and a.dtype is not torch.bool:
        return torch.add(a, b)
    return combine("sum" if op == "avg" else op, torch.stack([a, b]))
