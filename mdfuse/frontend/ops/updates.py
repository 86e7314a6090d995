"""Elements written: by tensors of indices, and by slices.

Where the result takes the place of x (`add_output(new, reuse=x)`) and nothing reads the old x
later, these elements are written into its buffer, and no others are touched. The indexed dim may be
split: each rank writes what it has.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import are_same, is_symbolic, larger, repeated
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, indexing, views
from mdfuse.frontend.ops.lookup_parts import check_index, vector_of_places, written_places
from mdfuse.frontend.ops.lookups import scatter_reduce
from mdfuse.frontend.ops.pointwise import cast, where
from mdfuse.frontend.ops.recording import Operand, check_dtype, own_place, record, shown

# -- by tensors of indices -----------------------------------------------------------------------


def index_copy(x: Handle, dim: int, index: Handle, source: Handle) -> Handle:
    """x with the places of source in place of its own, each at its index along the dim.

    Among equal indices the last one counts. Where the result reuses x, only these places are
    written.
    """
    at, index, source = vector_of_places("index_copy", x, dim, index, source)
    return record("index_copy", index, source, x, along=at)


def index_put(x: Handle, indices: Any, values: Handle, *, accumulate: bool = False) -> Handle:
    """x with values in place of x[indices], or added to them.

    Args:
        x: a tensor.
        indices: of the first dims, a tensor of integers for each, or None for a dim that is taken
            whole; repeated to one shape. Or one mask of the first dims: all elements where it
            holds get the same values.
        values: of x's dtype, repeated to the shape of x[indices].
        accumulate: add; else of equal indices the last one counts.
    """
    listed = [*indices] if isinstance(indices, (list, tuple)) else [indices]
    dims = [d for d, i in enumerate(listed) if i is not None]
    given = [listed[d] for d in dims]
    if not dims or len(listed) > x.ndim or values.dtype != x.dtype:
        raise DefinitionError(
            f"index_put of {shown(x)} with {len(given)} indices and {shown(values)}",
            because="there is an index for each of the first dims; values have x's dtype",
            hint=f"values.to({x.dtype})",
        )
    shown(given[0])
    if len(listed) == 1 and given[0].dtype == torch.bool:
        return _put_where(x, given[0], values, accumulate)
    at = [check_index("index_put", i, x, d, True) for d, i in zip(dims, given, strict=True)]
    shape = functools.reduce(_repeated, (tuple(i.shape) for i in at))
    count = math.prod(shape)
    vectors = [_vector(i, shape, count) for i in at]
    source = _in_front(x, dims, shape, values)
    others = tuple(n for d, n in enumerate(x.shape) if d not in dims)
    source = source if len(shape) == 1 else views.reshape(source, (count, *others))
    return record("index_put", *vectors, source, x, dims=tuple(dims), accumulate=accumulate)


def _repeated(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which tensors of two shapes are repeated."""
    n = builtins.max(len(a), len(b))
    pairs = zip((1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b, strict=True)
    try:
        return tuple(repeated(i, j) for i, j in pairs)
    except ValueError as error:
        raise DefinitionError(
            f"index_put with indices of shapes {list(a)} and {list(b)}",
            because=f"they are repeated to one shape, and {error}",
            hint="indices of one shape",
        ) from None


def _vector(index: Handle, shape: tuple[int, ...], count: int) -> Handle:
    wide = index if len(shape) == index.ndim and _are_same(index.shape, shape) else None
    wide = views.expand(index, shape) if wide is None else wide
    return wide if len(shape) == 1 else views.reshape(wide, (count,))


def _are_same(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) == len(b) and builtins.all(map(are_same, a, b))


def _in_front(x: Handle, dims: Sequence[int], shape: tuple[int, ...], values: Handle) -> Handle:
    """Return values with the dims of the indices in front, where torch has them at the first dim.

    Where the indexed dims are apart, torch has them in front as well.
    """
    first = dims[0] if [*dims] == [*range(dims[0], dims[-1] + 1)] else 0
    others = [n for d, n in enumerate(x.shape) if d not in dims]
    wanted = (*others[:first], *shape, *others[first:])
    wide = values if _are_same(values.shape, wanted) else views.expand(values, wanted)
    if not first:
        return wide
    front = [*range(first, first + len(shape))]
    return views.permute(wide, (*front, *(d for d in range(wide.ndim) if d not in front)))


def _put_where(x: Handle, mask: Handle, values: Handle, accumulate: bool) -> Handle:
    """Write the same values wherever a mask holds."""
    behind = x.ndim - mask.ndim
    is_one = values.ndim <= behind or (values.ndim == behind + 1 and are_same(values.shape[0], 1))
    is_of_x = behind >= 0 and all(map(are_same, mask.shape, x.shape))
    if not is_of_x or not is_one:
        raise DefinitionError(
            f"index_put of {shown(x)} where {shown(mask)} holds, with {shown(values)}",
            because="how many elements a mask takes is no shape, so all of them get the same",
            hint="where(mask, values, x), or positions as integers",
        )
    added = x + values if accumulate else values
    return where(views.reshape(mask, (*mask.shape, *(1,) * behind)), added, x)


def scatter(
    x: Handle, dim: int, index: Handle, src: Operand, *, reduce: str | None = None
) -> Handle:
    """x with elements of src for its own, each at its place, but along the dim at its index.

    Args:
        x: a tensor.
        dim: which may be split, in x and in src.
        index: of as many dims as x; of those that are equal the last one counts.
        src: of x's dtype, or a number.
        reduce: "add" or "multiply": as `scatter_reduce`.
    """
    if not isinstance(src, Handle):
        src = creations.full_like(index, src, dtype=x.dtype)
    if reduce is not None:
        known = {"add": "sum", "multiply": "prod"}
        return scatter_reduce(x, dim, index, src, known.get(reduce, reduce))
    check_dtype(x, src, "scatter of {1} into {0}", "src.to({})")
    if not x.ndim:
        return views.reshape(src, ())
    at, index, src = written_places(x, dim, index, src)
    vector = _one_of_all(index, x, at)
    if vector is not None:
        return record("index_copy", vector, src, x, along=at)
    return record("scatter", index, src, x, along=at)


def _one_of_all(index: Handle, x: Handle, dim: int) -> Handle | None:
    """Return the vector that an index repeats along all other dims of x, or None."""
    others = [d for d in range(x.ndim) if d != dim]
    is_repeated = builtins.all(
        are_same(index.shape[d], x.shape[d])
        and (d in index.value.expanded or are_same(x.shape[d], 1))
        for d in others
    )
    if not is_repeated or not others:
        return index if not others else None
    return indexing.index(
        index, tuple(0 if d != dim else builtins.slice(None) for d in range(x.ndim))
    )


# -- slices --------------------------------------------------------------------------------------


def slice_scatter(
    x: Handle,
    src: Handle,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Handle:
    """x with src in place of x[start:end:step] along a dim.

    src is replicated along the dim; x may be split.
    """
    at = own_place(x, dim)
    n = x.shape[at]
    part = builtins.slice(start, end, step) if step > 0 else builtins.slice(0)
    first, last, step = indexing.window_of(x, part, at)
    count = larger(-(-(last - first) // step), 0)
    wanted = (*x.shape[:at], count, *x.shape[at + 1 :])
    if src.shape != wanted:
        raise DefinitionError(
            f"slice_scatter of {shown(src)} into {shown(x)}[{start}:{end}:{step}] along dim {dim}",
            because=f"that slice is {list(wanted)}",
            hint="a source of that shape",
        )
    if not is_symbolic((count,)) and not count:
        return record("set", x)
    src = src if src.dtype == x.dtype else cast(src, x.dtype)
    if are_same(count, n):
        return record("set", src)
    starts = tuple(first if d == at else 0 for d in range(x.ndim))
    steps = tuple(step if d == at else 1 for d in range(x.ndim))
    if not is_symbolic((*x.shape, first, last)):
        return record("slice_scatter", src, x, starts=starts, steps=steps)
    places = creations.arange(count) * step + first
    return record("index_copy", places, src, x, along=at)


def select_scatter(x: Handle, src: Handle, dim: int, index: int) -> Handle:
    """x with src in place of one place of a dim."""
    at = own_place(x, dim)
    n = x.shape[at]
    if not -n <= index < n or src.ndim != x.ndim - 1:
        raise DefinitionError(
            f"select_scatter of {shown(src)} into {shown(x)} at {index} of dim {dim}",
            because=f"its places go from {-n} to {n - 1}; the source has the other dims",
            hint="slice_scatter writes several places",
        )
    index = index + n if index < 0 else index
    return slice_scatter(x, views.unsqueeze(src, at), at, index, index + 1)
