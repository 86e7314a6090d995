"""Elements by tensors of indices: looked up, added up.

The indexed dim may be split: the table is not moved, and the ranks' partial results are added.
Indices count from 0 (in `x[i]` also from the end) and must be in range; they are only checked if
`Options.check_indices` is set.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import larger, repeated
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, moves, views
from mdfuse.frontend.ops.lookup_parts import (
    added_up,
    at_indices,
    check_index,
    first_places,
    from_the_end,
    vector_of_places,
    written_places,
)
from mdfuse.frontend.ops.pointwise import ROWS, cast, where
from mdfuse.frontend.ops.recording import (
    Operand,
    check_factor,
    is_inexact,
    own_place,
    record,
    shown,
)

# -- lookups -------------------------------------------------------------------------------------


def index_select(x: Handle, dim: int, index: Handle) -> Handle:
    """The places of a dim that an index names: x[:, index] for dim 1.

    Args:
        x: a tensor.
        dim: may be split: ranks then add partial results, and x is not moved.
        index: integers of one dim (or a number), from 0 on.
    """
    if index.ndim > 1:
        raise DefinitionError(
            f"index_select of {shown(x)} with {shown(index)}",
            because="the index is a vector",
            hint="x[index] takes an index of any shape",
        )
    at = own_place(x, dim)
    positions = check_index("index_select", index, x, at)
    positions = positions if positions.ndim else views.reshape(positions, (1,))
    return added_up(x, lambda table: record("index_select", positions, table, along=at))


def gather(x: Handle, dim: int, index: Handle, *, sparse_grad: bool = False) -> Handle:
    """An element of x for each index: at its place, but along the dim at the index.

    Args:
        x: a tensor.
        dim: may be split: ranks then add partial results, and x is not moved.
        index: of as many dims as x, along the others no longer than it.
        sparse_grad: taken as in torch; gradients are dense.
    """
    x, index = _alike("gather", x, dim, index)
    if not x.ndim:
        return record("set", x)
    at = own_place(x, dim)
    return added_up(x, lambda table: record("gather", index, table, along=at))


def _alike(name: str, x: Handle, dim: int, index: Handle) -> tuple[Handle, Handle]:
    """Return x cut to the index's extents except along the dim, and the index in 64 bits."""
    at = own_place(x, dim) if x.ndim else 0
    index = check_index(name, index, x, at)
    fits = index.ndim == x.ndim and builtins.all(
        d == at or n <= m for d, (n, m) in enumerate(zip(index.shape, x.shape, strict=True))
    )
    if not fits:
        raise DefinitionError(
            f"{name} of {shown(x)} along dim {dim} with the index {shown(index)}",
            because="an index has the dims of x, and along the others no more places",
            hint="take_along_dim repeats an index",
        )
    return first_places(x, index.shape, at), index


def take_along_dim(x: Handle, indices: Handle, dim: int | None = None) -> Handle:
    """`gather` with x and the indices repeated to one shape; without a dim of both flattened.

    As in torch, indices wrap around: the index after the last is the first.
    """
    if dim is None:
        x, indices, dim = views.flatten(x), views.flatten(indices), 0
    if x.ndim != indices.ndim or not x.ndim:
        raise DefinitionError(
            f"take_along_dim of {shown(x)} with {shown(indices)}",
            because="both have the same number of dims",
            hint="unsqueeze one of them",
        )
    at = own_place(x, dim)
    pairs = [*zip(x.shape, indices.shape, strict=True)]
    try:
        both = [(n, m) if d == at else (repeated(n, m),) * 2 for d, (n, m) in enumerate(pairs)]
    except ValueError as error:
        raise DefinitionError(
            f"take_along_dim of {shown(x)} along dim {dim} with {shown(indices)}",
            because=f"the other dims are as long, or 1, and {error}",
            hint="expand one of them",
        ) from None
    indices = ROWS["remainder"](indices, larger(x.shape[at], 1))
    wide = views.expand(x, [n for n, _ in both])
    return gather(wide, at, views.expand(indices, [m for _, m in both]))


def take(x: Handle, index: Handle) -> Handle:
    """Elements of x flattened."""
    return at_indices(views.flatten(x), 0, [index])


# -- writes --------------------------------------------------------------------------------------


def scatter_add(x: Handle, dim: int, index: Handle, src: Handle) -> Handle:
    """x with the elements of src added, each at its place, but along the dim at its index."""
    return scatter_reduce(x, dim, index, src, "sum")


_REDUCES = {"sum": "sum", "prod": "prod", "amax": "max", "amin": "min", "mean": "sum"}


def scatter_reduce(
    x: Handle, dim: int, index: Handle, src: Handle, reduce: str, *, include_self: bool = True
) -> Handle:
    """x joined with the elements of src, each at its place, but along the dim at its index.

    Args:
        x: a tensor.
        dim: which may be split, in x and in src.
        index: of as many dims as x.
        src: of x's dtype, at least as long as the index.
        reduce: "sum", "prod", "mean", "amax" or "amin".
        include_self: whether x's own elements are joined, where src has some as well.
    """
    if reduce not in _REDUCES or src.dtype != x.dtype or x.dtype == torch.bool:
        raise DefinitionError(
            f"scatter_reduce of {shown(x)} and {shown(src)} with reduce={reduce!r}",
            because="both have one dtype, of numbers; it is one of " + ", ".join(_REDUCES),
            hint=f"src.to({x.dtype})",
        )
    if not x.ndim:
        one, places, new = (views.reshape(y, (1,)) for y in (x, index, src))
        return views.reshape(
            scatter_reduce(one, 0, places, new, reduce, include_self=include_self), ()
        )
    at, index, src = written_places(x, dim, index, src)
    op = _REDUCES[reduce]
    joined = _scattered(x, at, index, src, op)
    if reduce == "sum" and include_self:
        return x + joined
    hits = _scattered(x, at, index, creations.ones_like(index), "sum")
    is_hit = ROWS["gt"](hits, 0)
    if include_self and op in ("max", "min") and is_inexact(x):
        best = record("gather", index, first_places(joined, index.shape, at), along=at)
        equals = _scattered(x, at, index, cast(ROWS["eq"](src, best), torch.int64), "sum")
        joined = _among_equals(op, x, joined, equals)
    elif include_self:
        joined = _WITH_SELF[op](x, joined)
        hits = hits + 1
    if reduce == "mean":
        count = ROWS["maximum"](hits, 1)
        is_whole = not is_inexact(x)
        joined = ROWS["floor_divide"](joined, count) if is_whole else joined / cast(count, x.dtype)
    return where(is_hit, joined, x)


def _among_equals(op: str, x: Handle, y: Handle, count: Handle) -> Handle:
    """The extremes of x and y; where they are equal, y has the gradient of `count` elements."""
    share = cast(count, torch.float32) / cast(count + 1, torch.float32)
    apart = where(ROWS["eq"](ROWS["abs"](x), math.inf), 0.0, y - x)
    equal = x + apart * cast(share, x.dtype)  # no more than x, whose slope it has in part
    above, below = ROWS["gt"](x, y), ROWS["lt"](x, y)
    is_x, is_y = (above, below) if op == "max" else (below, above)
    return where(is_x, x, where(is_y, y, equal))


_WITH_SELF: dict[str, Callable[[Handle, Handle], Handle]] = {
    "sum": ROWS["add"],
    "prod": ROWS["mul"],
    "max": ROWS["maximum"],
    "min": ROWS["minimum"],
}


def _scattered(x: Handle, dim: int, index: Handle, src: Handle, op: str) -> Handle:
    """Return the reduced elements of src at each place of x; 0 outside of the index's extents."""
    shape = tuple(x.shape[d] if d == dim else n for d, n in enumerate(index.shape))
    scattered = record("scatter_reduce", index, src, shape=shape, along=dim, reduce=op)
    beside = [0] * (2 * x.ndim)
    for d, n in enumerate(shape):
        beside[2 * (x.ndim - 1 - d) + 1] = x.shape[d] - n
    return moves.pad(scattered, beside) if shape != x.shape else scattered


def index_add(x: Handle, dim: int, index: Handle, source: Handle, *, alpha: Operand = 1) -> Handle:
    """x with alpha times the places of source added, each at its index along the dim.

    Args:
        x: a tensor.
        dim: which may be split, in x and in the source.
        index: a vector, one number for each place of the source.
        source: of x's dtype and shape, but along the dim.
        alpha: a factor.
    """
    at, index, source = vector_of_places("index_add", x, dim, index, source)
    sums = record("index_sum", index, source, shape=x.shape, along=at)
    return x + (sums if alpha == 1 else sums * alpha)


def index_fill(x: Handle, dim: int, index: Handle, value: Operand) -> Handle:
    """x with a number at the places of a dim that an index names."""
    at = own_place(x, dim)
    index = from_the_end(check_index("index_fill", index, x, at, from_end=True), x.shape[at])
    index = index if index.ndim else views.reshape(index, (1,))
    check_factor("index_fill", value, x)
    n = x.shape[at]
    hits = record("index_sum", index, creations.ones_like(index), shape=(n,), along=0)
    is_hit = views.reshape(ROWS["gt"](hits, 0), (n, *(1,) * (x.ndim - 1 - at)))
    filled = where(is_hit, value, x)
    return filled if filled.dtype == x.dtype else cast(filled, x.dtype)


def masked_scatter(x: Handle, mask: Handle, source: Handle) -> Handle:
    """x with the elements of source, one after the other, where the mask holds."""
    if mask.dtype != torch.bool or source.dtype != x.dtype:
        raise DefinitionError(
            f"masked_scatter of {shown(source)} into {shown(x)} by {shown(mask)}",
            because="a mask is made of bools; both others have one dtype",
            hint=f"source.to({x.dtype})",
        )
    wide = views.flatten(views.expand(mask, x.shape))
    place = record("cumsum", cast(wide, torch.int64), dim=0) - 1
    source = views.flatten(source)
    place = ROWS["minimum"](ROWS["maximum"](place, 0), larger(source.shape[0] - 1, 0))
    elements = record("index_select", place, source, along=0)
    return where(mask, views.reshape(elements, x.shape), x)
