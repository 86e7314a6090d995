"""Contractions of any dims: einsum and operations composed of it.

Two tensors are contracted at a time, in the order of `opt_einsum`. Every dim may be split: a summed
dim gives partial sums, which the ranks add.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from mdfuse.errors import DefinitionError, counted
from mdfuse.extents.extent import example, repeated
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import masks, reductions, views
from mdfuse.frontend.ops.products import matmul
from mdfuse.frontend.ops.recording import listed, record, shown
from mdfuse.frontend.plain import brief

_LETTERS = string.ascii_lowercase + string.ascii_uppercase


def einsum(equation: str, *operands: Handle | Sequence[Handle]) -> Handle:
    """Products summed over letters: "bij,bjk->bik" is `bmm`.

    Args:
        equation: letters for the dims of each operand, and of the result; without "->" those that
            stand once, in order. "..." stands for any dims.
        operands: values, or one list of them.

    >>> import mdfuse as mf
    >>> with mf.FusionDefinition() as fd:
    ...     q, k = (fd.define_tensor([2, 4, 3, 8]) for _ in range(2))
    ...     scores = mf.ops.einsum("bhqd,bhkd->bhqk", q, k)
    ...     fd.add_output(scores)
    >>> scores.shape
    (2, 4, 3, 3)
    """
    given = listed("einsum", operands)
    terms, result = _terms(equation, given)
    return _contracted(equation, terms, result, [*given])


def _refused(equation: str, operands: Sequence[Handle], why: str) -> DefinitionError:
    return DefinitionError(
        f"einsum({equation!r}) of " + ", ".join(map(shown, operands)),
        because=why,
        hint="a letter for each dim, the letters of the result behind ->",
    )


def _terms(equation: str, operands: Sequence[Handle]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, `...` written out."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise _refused(equation, operands, f"it has {counted(len(terms), 'term')}")
    free = [c for c in _LETTERS if c not in equation]
    widest, full_terms = 0, []
    for term, x in zip(terms, operands, strict=True):
        implied = x.ndim - len(term.replace("...", ""))
        if implied < 0 or (implied and "..." not in term) or implied > len(free):
            raise _refused(equation, operands, f"{term!r} stands for {shown(x)}")
        widest = max(widest, implied if "..." in term else 0)
        dots = "".join(free[:implied][::-1])  # aligned from the right
        full_terms.append(term.replace("...", dots))
    dots = "".join(free[:widest][::-1])
    if arrow:
        result = right.replace("...", dots)
    else:
        every = "".join(full_terms)
        result = dots + "".join(sorted(c for c in {*every} - {*dots} if every.count(c) == 1))
    strange = [c for c in "".join((*full_terms, result)) if c not in _LETTERS]
    if strange or len({*result}) < len(result) or not {*result} <= {*"".join(full_terms)}:
        raise _refused(equation, operands, "each letter of the result is in a term")
    return full_terms, result


def _contracted(equation: str, terms: list[str], result: str, values: list[Handle]) -> Handle:
    sizes: dict[str, int] = {}
    for i, x in enumerate(values):
        terms[i], values[i] = _once(terms[i], x)
        for letter, n in zip(terms[i], values[i].shape, strict=True):
            known = sizes.setdefault(letter, n)
            try:
                sizes[letter] = repeated(known, n)
            except ValueError:
                raise _refused(equation, values, f"{letter} is {known}, and {n}") from None
    for pair in _path(terms, result, sizes):
        taken = sorted(pair, reverse=True)
        (second, b), (first, a) = ((terms.pop(i), values.pop(i)) for i in taken)
        wanted = {*result, *"".join(terms)}
        letters = [c for c in dict.fromkeys(first + second) if c in wanted]
        letters = [*result] if not terms else letters
        terms.append("".join(letters))
        values.append(_pair(first, second, letters, a, b))
    return _arranged(terms[0], result, values[0])


def _once(term: str, x: Handle) -> tuple[str, Handle]:
    """A term without repeated letters: their diagonal."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            x = masks.diagonal(x, 0, first, second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
    return term, x


def _path(terms: Sequence[str], result: str, sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """Return the pairs to contract, in order, until one operand is left."""
    if len(terms) == 1:
        return []
    if len(terms) == 2:
        return [(0, 1)]
    import opt_einsum  # type: ignore[import-untyped]

    shapes = [tuple(example(sizes[c]) for c in term) for term in terms]
    equation = f"{','.join(terms)}->{result}"
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
    pairs: list[tuple[int, ...]] = []
    count = len(terms)
    for step in path:
        many = sorted(step)
        while len(many) > 2:  # contract the last two of more than two
            pairs.append(tuple(many[-2:]))
            many = [*many[:-2], count - 2]
            count -= 1
        pairs.append(tuple(many))
        count -= 1
    return [step for step in pairs if len(step) == 2]


def _pair(first: str, second: str, out: Sequence[str], a: Handle, b: Handle) -> Handle:
    labels = {c: i for i, c in enumerate(dict.fromkeys(first + second))}
    left, right, result = (tuple(labels[c] for c in term) for term in (first, second, out))
    return record("contract", a, b, left=left, right=right, kept=result)


def _arranged(term: str, result: str, x: Handle) -> Handle:
    """Sum over letters that the result lacks, and transpose to its order."""
    gone = tuple(d for d, c in enumerate(term) if c not in result)
    x = reductions.sum(x, gone, dtype=x.dtype) if gone else x
    left = [c for c in term if c in result]
    return views.permute(x, [left.index(c) for c in result]) if result else record("set", x)


# -- composed of einsum ----------------------------------------------------------------------------


def tensordot(x: Handle, other: Handle, dims: Any = 2) -> Handle:
    """Products summed over dims: the last ones of x with the first ones of the other.

    Args:
        x: a tensor.
        other: another one.
        dims: how many; or two lists, of dims of x and of the other.
    """
    pair: list[list[int]] = []
    if isinstance(dims, int) and 0 <= dims <= min(x.ndim, other.ndim):
        pair = [list(range(x.ndim - dims, x.ndim)), list(range(dims))]
    elif isinstance(dims, Sequence) and all(isinstance(d, int | Sequence) for d in dims):
        pair = [[d] if isinstance(d, int) else [*d] for d in dims]
    shapes = (x, other)
    fits = (
        len(pair) == 2
        and len(pair[0]) == len(pair[1])
        and all(-y.ndim <= d < y.ndim for y, axes in zip(shapes, pair, strict=True) for d in axes)
    )
    if not fits:
        raise DefinitionError(
            f"tensordot of {shown(x)} and {shown(other)} over {brief(dims)}",
            because="as many dims of the one as of the other are summed over",
            hint="a number, or two lists",
        )
    first, second = [*_LETTERS[: x.ndim]], [*_LETTERS[x.ndim : x.ndim + other.ndim]]
    for a, b in zip(*pair, strict=True):
        if x.shape[a] != other.shape[b]:
            raise DefinitionError(
                f"tensordot of {shown(x)} and {shown(other)} over {brief(dims)}",
                because=f"dim {a} of the one is {x.shape[a]}, dim {b} of the other "
                f"{other.shape[b]}",
                hint="dims of one extent",
            )
        second[b] = first[a]
    once = [c for c in (*first, *second) if (*first, *second).count(c) == 1]
    return _pair("".join(first), "".join(second), once, x, other)


def inner(x: Handle, other: Handle) -> Handle:
    """Products summed over the last dim of both."""
    if not x.ndim or not other.ndim:
        return x * other
    if x.shape[-1] != other.shape[-1]:
        raise DefinitionError(
            f"inner of {shown(x)} and {shown(other)}",
            because="the last dims are of one extent",
            hint="transpose one of them",
        )
    return tensordot(x, other, ([x.ndim - 1], [other.ndim - 1]))


def vdot(x: Handle, other: Handle) -> Handle:
    """The product of two vectors, with the conjugates of the first one."""
    if x.ndim != 1 or other.ndim != 1:
        raise DefinitionError(
            f"vdot of {shown(x)} and {shown(other)}", because="both are vectors", hint="inner"
        )
    return matmul(record("conj", x) if x.dtype.is_complex else x, other)


def chain_matmul(*tensors: Handle | Sequence[Handle]) -> Handle:
    """The product of several matrices, in the order that takes the fewest steps.

    Args:
        tensors: matrices (the first and the last may be vectors), or one list of them.
    """
    given = listed("chain_matmul", tensors)
    inside = given[1:-1]
    if any(x.ndim != 2 for x in inside) or any(x.ndim not in (1, 2) for x in given):
        raise DefinitionError(
            "multi_dot of " + ", ".join(map(shown, given)),
            because="it takes matrices; the first and the last may be vectors",
            hint="matmul for batches",
        )
    if len(given) == 1:
        return record("set", given[0])
    letters = iter(_LETTERS)
    at, terms = next(letters), []
    for x in given:
        if x.ndim == 1:
            terms.append(at)
            continue
        behind = next(letters)
        terms.append(at + behind)
        at = behind
    ends = (terms[0][0] if given[0].ndim == 2 else "") + (at if given[-1].ndim == 2 else "")
    return einsum(f"{','.join(terms)}->{ends}", *given)


def bilinear(x1: Handle, x2: Handle, weight: Handle, bias: Handle | None = None) -> Handle:
    """x1[…,i] weight[o,i,j] x2[…,j] + bias[o]."""
    if weight is None or weight.ndim != 3:
        raise DefinitionError(
            "bilinear without a weight of three dims", because="it is [o,i,j]", hint="einsum"
        )
    product = einsum("...i,oij,...j->...o", x1, weight, x2)
    return product if bias is None else product + bias
