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

#: Bytes to which kernels expect what they write to be aligned.
_ALIGNED = 16


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
    nest, values = _known(span, known)
    if nest == 0:
        return values[0]
    # The larger of 0.0 and -0.0 is either in a kernel, so other reductions are left to the calls.
    is_fused = compiles and op in _SUMS and all(map(_is_large, values))
    fused = _fused(op, nest, tuple(map(form_of, values))) if is_fused else None
    return _reduced(op, nest, values) if fused is None else fused(*values)[0]


def _is_large(x: Tensor) -> bool:
    return x.is_cuda and x.nbytes >= _LARGE


def _known(span: Span, known: Mapping[Span, Tensor]) -> tuple[Nest, list[Tensor]]:
    """Return a subtree as pairs of pairs, and the values that it names."""
    used: list[Span] = []
    nest = _nest(span, known, used)
    return nest, [known[of] for of in used]


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

    return _kernel(("tree", op, nest), forms, every)


def _fused_into(nest: Nest, forms: tuple[Form, ...]) -> Callable[..., list[Tensor]] | None:
    """Return one kernel that writes a sum into its first argument, rounded there; see `_fused`."""

    def every(out: Tensor, *values: Tensor) -> list[Tensor]:
        out.copy_(_reduced("sum", nest, values))
        return []

    return _kernel(("tree into", nest), forms, every)


def _kernel(
    key: tuple[object, ...], forms: tuple[Form, ...], calls: Callable[..., list[Tensor]]
) -> Callable[..., list[Tensor]] | None:
    tally = Tally()
    kernel = known_function(key, forms, tally) or traced(key, forms, calls)
    complete([kernel], 0.0, False, tally)
    return kernel.function


def total(op: str, count: int, known: Mapping[Span, Tensor], compiles: bool = False) -> Tensor:
    """Return a tree reduced, in the working dtype; an average is divided once, at the end."""
    whole = term(reduced(op, (0, count), known, compiles))
    return whole / count if op == "avg" else whole


def write(
    out: Tensor, op: str, count: int, known: Mapping[Span, Tensor], compiles: bool = False
) -> None:
    """Write a tree reduced into a tensor, in whose dtype it is rounded.

    A large sum on a GPU is written by the kernel that adds: nothing of it lies in memory in f32.
    The division of an average is left to the call, which multiplies by the inverse there.
    """
    nest, values = _known((0, count), known)
    every = [out, *values]
    is_fused = compiles and op == "sum" and nest != 0 and all(map(_is_large, every))
    is_fused = is_fused and _is_apart(out, values)
    fused = _fused_into(nest, tuple(map(form_of, every))) if is_fused else None
    if fused is None:
        out.copy_(total(op, count, known, compiles))
    else:
        fused(*every)


def _is_apart(out: Tensor, values: Sequence[Tensor]) -> bool:
    """Return whether a kernel may write a tensor: no term lies there, and it lies as a new one."""
    held = {x.untyped_storage().data_ptr() for x in values}
    return out.untyped_storage().data_ptr() not in held and out.data_ptr() % _ALIGNED == 0


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
