"""Reductions in the order of a fixed binary tree, whichever rank has which of the terms.

The tree over n terms halves them: (((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))). A rank adds up the
largest subtrees of which it has all terms, so few numbers travel; those who get them add the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from mdfuse.layouts.reduction import combine, working_dtype
from mdfuse.plan.compilation import Tally, complete, traced
from mdfuse.plan.compilation import known as known_function
from mdfuse.plan.tensor_meta import Form, form_of

#: A subtree: its first term, and the one behind its last.
Span = tuple[int, int]

#: A subtree as pairs of pairs of numbers of values.
Nest = int | tuple["Nest", "Nest"]

#: Reductions that add.
_SUMS = ("sum", "avg")

#: Bytes from which on a GPU adds all values of a subtree in one kernel.
_LARGE = 1 << 20


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


def reduced(op: str, span: Span, known: Mapping[Span, Tensor], compiles: bool = False) -> Tensor:
    """Return a subtree reduced, in the working dtype unless it is known.

    Args:
        op: of the reduction.
        span: the subtree.
        known: subtrees -> their values, in any dtype; all single terms at least.
        compiles: whether a GPU may add large values in one compiled kernel.
    """
    used: list[Span] = []
    nest = _nest(span, known, used)
    values = [known[of] for of in used]
    if nest == 0:
        return values[0]
    # The larger of 0.0 and -0.0 is either in a kernel, so other reductions are left to the calls.
    is_fused = compiles and op in _SUMS and all(map(_is_large, values))
    fused = _fused(op, nest, tuple(map(form_of, values))) if is_fused else None
    return _reduced(op, nest, values) if fused is None else fused(*values)[0]


def _is_large(x: Tensor) -> bool:
    return x.is_cuda and x.nbytes >= _LARGE


def _nest(span: Span, known: Mapping[Span, Tensor], used: list[Span]) -> Nest:
    """Return a subtree as pairs of pairs, down to numbers of known ones, which are listed."""
    if span in known:
        used.append(span)
        return len(used) - 1
    first, second = halves(span)
    return _nest(first, known, used), _nest(second, known, used)


def _reduced(op: str, nest: Nest, values: Sequence[Tensor]) -> Tensor:
    if isinstance(nest, int):
        return term(values[nest])
    first, second = nest
    return _pair(op, _reduced(op, first, values), _reduced(op, second, values))


def _fused(op: str, nest: Nest, forms: tuple[Form, ...]) -> Callable[..., list[Tensor]] | None:
    """Return one kernel that reads each value once; None where the compiler makes none.

    It has the bits of the calls, as it adds the same pairs in f32.
    """

    def every(*values: Tensor) -> list[Tensor]:
        return [_reduced(op, nest, values)]

    tally, key = Tally(), ("tree", op, nest)
    kernel = known_function(key, forms, tally) or traced(key, forms, every)
    complete([kernel], 0.0, False, tally)
    return kernel.function


def total(op: str, count: int, known: Mapping[Span, Tensor], compiles: bool = False) -> Tensor:
    """Return a tree reduced, in the working dtype; an average is divided once, at the end."""
    whole = term(reduced(op, (0, count), known, compiles))
    return whole / count if op == "avg" else whole


def term(x: Tensor) -> Tensor:
    """Return a term in the dtype in which it is added: of narrow floats f32, rounded at the end."""
    return x if x.dtype is torch.bool else x.to(working_dtype(x.dtype))


def room(one: Tensor, span: Span, size: int) -> Tensor:
    """Return room for elements of a subtree: a single term has its own dtype, as `one` has it."""
    is_single = span[1] - span[0] == 1
    return one.new_empty(size, dtype=one.dtype if is_single else term(one[:0]).dtype)


def _pair(op: str, a: Tensor, b: Tensor) -> Tensor:
    if op in _SUMS and a.dtype is not torch.bool:
        return torch.add(a, b)
    return combine("sum" if op == "avg" else op, torch.stack([a, b]))
