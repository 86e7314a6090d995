"""Operations by masks of indices: triangles, diagonals, one-hot rows, searches, histograms.

Each rank makes its own part of a mask, so masked values stay split.
"""

from __future__ import annotations

import builtins

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import larger, smaller
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, indexing, reductions, views
from mdfuse.frontend.ops.pointwise import ROWS, cast, where
from mdfuse.frontend.ops.recording import own_place, place, record, shown


def _places(n: int, behind: int = 0, dtype: torch.dtype = torch.int64) -> Handle:
    """Return the numbers from 0 to n - 1 along a dim followed by `behind` dims."""
    numbers = creations.arange(n, dtype=dtype)
    return views.reshape(numbers, (n, *(1,) * behind)) if behind else numbers


def _zero(x: Handle) -> float | bool:
    return False if x.dtype == torch.bool else 0


def _matrix(name: str, x: Handle) -> None:
    if x.ndim < 2:
        raise DefinitionError(
            f"{name} of {shown(x)}",
            because="it is about the rows and columns of matrices",
            hint="a value of two dims or more",
        )


def tril(x: Handle, diagonal: int = 0) -> Handle:
    """The lower triangle of the last two dims, up to the diagonal-th diagonal; above it zeros."""
    _matrix("tril", x)
    rows, columns = _places(x.shape[-2], 1), _places(x.shape[-1])
    return where(ROWS["le"](columns - rows, diagonal), x, _zero(x))


def triu(x: Handle, diagonal: int = 0) -> Handle:
    """The upper triangle of the last two dims, from the diagonal-th diagonal on; below it zeros."""
    _matrix("triu", x)
    rows, columns = _places(x.shape[-2], 1), _places(x.shape[-1])
    return where(ROWS["ge"](columns - rows, diagonal), x, _zero(x))


# -- diagonals -----------------------------------------------------------------------------------


def _two(x: Handle, dim1: int, dim2: int, new: int = 0) -> tuple[int, int]:
    first, second = place(x, dim1, new), place(x, dim2, new)
    if first == second:
        raise DefinitionError(
            f"a diagonal of {shown(x)} along the dims {dim1} and {dim2}",
            because="a diagonal goes along two dims",
            hint="two different dims",
        )
    return first, second


def diagonal(x: Handle, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Handle:
    """The elements along a diagonal of two dims, as the last dim.

    Args:
        x: a tensor of at least two dims, which may be split along both.
        offset: how many places the diagonal is above the main one; negative: below it.
        dim1: of the rows.
        dim2: of the columns.
    """
    _matrix("diagonal", x)
    first, second = _two(x, dim1, dim2)
    n, m = x.shape[first], x.shape[second]
    x = views.movedim(x, (first, second), (-2, -1))
    is_there = ROWS["eq"](_places(m) - _places(n, 1), offset)
    masked = where(is_there, x, _zero(x))
    elements = (
        reductions.any(masked, -1)
        if x.dtype == torch.bool
        else reductions.sum(masked, -1, dtype=x.dtype)
    )
    start = larger(-offset, 0)
    end = larger(start, smaller(n, m - offset))
    return indexing.index(elements, (..., builtins.slice(start, end)))


def diag_embed(x: Handle, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Handle:
    """Matrices of zeros with the last dim of x along a diagonal."""
    own_place(x, -1)
    first, second = _two(x, dim1, dim2, new=1)
    n = x.shape[-1] + builtins.abs(offset)
    wide = _with_zeros(x, builtins.abs(offset))
    wide = views.unsqueeze(wide, -1 if offset >= 0 else -2)  # index by rows, or by columns
    is_there = ROWS["eq"](_places(n) - _places(n, 1), offset)
    return views.movedim(where(is_there, wide, _zero(x)), (-2, -1), (first, second))


def _with_zeros(x: Handle, count: int) -> Handle:
    """Append zeros to the last dim."""
    shape = (*x.shape[:-1], x.shape[-1] + count)
    if not count:
        return x
    return record("slice_grad", x, shape=shape, starts=(0,) * x.ndim, steps=(1,) * x.ndim)


def diag(x: Handle, diagonal: int = 0) -> Handle:
    """The matrix with a vector along a diagonal, or the diagonal of a matrix."""
    if x.ndim == 1:
        return diag_embed(x, diagonal)
    if x.ndim == 2:
        return _diagonal(x, diagonal)
    raise DefinitionError(
        f"diag of {shown(x)}", because="it takes a vector or a matrix", hint="diagonal, diag_embed"
    )


_diagonal = diagonal


def trace(x: Handle) -> Handle:
    """The sum along the diagonal of a matrix."""
    if x.ndim != 2:
        raise DefinitionError(
            f"trace of {shown(x)}",
            because="it takes a matrix",
            hint="diagonal(x, 0, -2, -1).sum(-1)",
        )
    is_there = ROWS["eq"](_places(x.shape[1]), _places(x.shape[0], 1))
    return reductions.sum(where(is_there, x, _zero(x)))


# -- counts and classes --------------------------------------------------------------------------


def one_hot(x: Handle, num_classes: int = -1) -> Handle:
    """For each index a row of zeros with a 1 at its place; of an index out of range all zeros.

    Args:
        x: integers of 64 bits.
        num_classes: the length of a row; unlike torch's -1, it is not taken from the indices.
    """
    if num_classes < 1 or x.dtype != torch.int64:
        raise DefinitionError(
            f"one_hot of {shown(x)} with num_classes={num_classes}",
            because="the shape of the result is known when the fusion is defined; x is int64",
            hint="one_hot(x, num_classes)",
        )
    return cast(ROWS["eq"](views.unsqueeze(x, -1), _places(num_classes)), torch.int64)


def isin(
    x: Handle, test_elements: Handle, *, assume_unique: bool = False, invert: bool = False
) -> Handle:
    """True for each element of x that is among the test elements."""
    flat = views.flatten(test_elements) if test_elements.ndim != 1 else test_elements
    is_member = reductions.any(ROWS["eq"](views.unsqueeze(x, -1), flat), -1)
    return ROWS["logical_not"](is_member) if invert else is_member


def searchsorted(
    x: Handle,
    values: Handle,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
) -> Handle:
    """The number of elements of a sorted sequence below each value, or with right not above it.

    Each value is compared with each element, so both may be split.

    Args:
        x: [n], or […,n] with the leading dims of the values.
        values: the searched values.
        out_int32: the counts have 32 bits.
        right: count equal ones as well.
        side: "left" or "right", the same choice as right.
    """
    if side not in (None, "left", "right") or (side == "left" and right):
        raise DefinitionError(
            f"searchsorted with side={side!r} and right={right}",
            because="both say whether what is equal counts",
            hint='side="left" or side="right"',
        )
    if not x.ndim or (x.ndim > 1 and x.shape[:-1] != values.shape[:-1]):
        raise DefinitionError(
            f"searchsorted of {shown(x)} and {shown(values)}",
            because="there is one sequence, or one for each row of values",
            hint="x: [n], or [rows, n] for values of [rows, m]",
        )
    if x.ndim > 1:
        x = views.unsqueeze(x, -2)
    count = ROWS["le" if right or side == "right" else "lt"](x, views.unsqueeze(values, -1))
    return reductions.sum(count, -1, dtype=torch.int32 if out_int32 else torch.int64)


def bucketize(
    x: Handle, boundaries: Handle, *, out_int32: bool = False, right: bool = False
) -> Handle:
    """Between which of some sorted boundaries each element is: `searchsorted` the other way."""
    if boundaries.ndim != 1:
        raise DefinitionError(
            f"bucketize of {shown(x)} by {shown(boundaries)}",
            because="the boundaries are a vector",
            hint="searchsorted takes one sequence for each row",
        )
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


def histc(x: Handle, bins: int = 100, min: float = 0, max: float = 0) -> Handle:
    """The number of elements in each of some bins of one width, from min to max.

    Args:
        x: floating, or of integers; elements out of the range, and NaN, are not counted.
        bins: their number.
        min, max: the range, of integers as for `int`; torch's 0 and 0, which stand for that of x,
            are refused, but for one bin, in which all elements are.
    """
    is_whole = not x.dtype.is_floating_point
    low, high = (int(min), int(max)) if is_whole else (min, max)
    is_all, has_bins = bins == 1 and low == high, bins > 0 and low < high
    is_real = x.dtype not in (torch.bool, torch.complex64, torch.complex128)
    if not is_real or not (has_bins or is_all):
        raise DefinitionError(
            f"histc of {shown(x)} in {bins} bins from {min} to {max}",
            because="the bins are known when the fusion is defined; x is floating, or of integers",
            hint="histc(x, bins, min, max) with min < max",
        )
    if is_all:
        return views.unsqueeze(reductions.sum(ROWS["eq"](x, x), dtype=x.dtype), 0)
    if is_whole:
        wide = x.to(torch.int64)
        bin_numbers = ((wide - low) * bins) // (high - low)
    else:
        wide, bin_numbers = x, ROWS["floor"]((x - low) * (bins / (high - low)))
    bin_numbers = where(ROWS["eq"](wide, high), bins - 1, bin_numbers)
    is_there = ROWS["eq"](views.unsqueeze(bin_numbers, -1), _places(bins, dtype=wide.dtype))
    return reductions.sum(is_there, dims=tuple(range(x.ndim)), dtype=x.dtype)
