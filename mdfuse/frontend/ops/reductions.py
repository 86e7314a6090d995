"""Reductions: rows of the op table, and compositions of these.

A reduced dim may be split over ranks; the ranks' partial results are then reduced. Composed
reductions of f16 and bf16 are computed in f32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent, larger
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import pointwise
from mdfuse.frontend.ops.pointwise import ROWS, cast
from mdfuse.frontend.ops.recording import (
    Dims,
    Elementwise,
    Integers,
    Operation,
    again,
    as_dtype,
    back,
    checked,
    chosen,
    floating,
    in_f32,
    named,
    record,
    squared,
    with_fractions,
)
from mdfuse.frontend.ops.reduction_parts import log_of_sum


def _of_all(name: str, doc: str) -> Elementwise:
    def function(
        x: Handle,
        dim: Dims = None,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
        *,
        dims: Integers | None = None,
    ) -> Handle:
        return record(name, x, dims=checked(x, dim, dims), keepdim=keepdim, dtype=dtype)

    return named(name, doc, function)


sum = _of_all("sum", "Sum over dims (all by default).")
prod = _of_all("prod", "Product over dims (all by default).")


def mean(
    x: Handle,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    dims: Integers | None = None,
) -> Handle:
    """Mean over dims (all by default)."""
    x = x if dtype is None or dtype == x.dtype else cast(x, dtype)
    return record("mean", x, dims=checked(x, dim, dims), keepdim=keepdim)


def _plain(name: str, op: str, doc: str) -> Elementwise:
    def function(
        x: Handle, dim: Dims = None, keepdim: bool = False, *, dims: Integers | None = None
    ) -> Handle:
        return record(op, x, dims=checked(x, dim, dims), keepdim=keepdim)

    return named(name, doc, function)


amax = _plain("amax", "max", "The largest element over dims (all by default).")
amin = _plain("amin", "min", "The smallest element over dims (all by default).")
any = _plain("any", "any", "Whether some element is true, over dims (all by default).")
all = _plain("all", "all", "Whether every element is true, over dims (all by default).")


# -- composed reductions ---------------------------------------------------------------------------


def count_nonzero(x: Handle, dim: Dims = None, *, dims: Integers | None = None) -> Handle:
    """The number of elements that are not zero, over dims (all by default)."""
    return sum(ROWS["ne"](x, 0), chosen(dim, dims))


def _moments(
    x: Handle,
    over: tuple[int, ...] | None,
    unbiased: bool | None,
    keepdim: bool,
    correction: float | None,
) -> tuple[Handle, Handle]:
    """Return the variance, and the mean with its dims kept, both in at least 32 bits."""
    if correction is None:
        correction = 0 if unbiased is False else 1
    with again(x):
        wide = in_f32(x)
    centre = mean(wide, over, keepdim=True)
    count = math.prod(x.shape[d] for d in (range(x.ndim) if over is None else over))
    squares = sum(_squared_distance(wide, centre), over, keepdim)
    if isinstance(count, Extent) and isinstance(correction, int) and correction >= 0:
        return squares / larger(count - correction, 0), centre  # without a guard on the count
    divisor = count - correction if count else 0  # without elements it is NaN for any correction
    if divisor > 0 or x.dtype.is_complex:
        return squares / max(divisor, 0), centre
    return _of_too_few(squares, wide, centre, over, keepdim, divisor), centre


def _of_too_few(
    squares: Handle,
    wide: Handle,
    centre: Handle,
    over: tuple[int, ...] | None,
    keepdim: bool,
    divisor: float,
) -> Handle:
    """Return a variance of at most `correction` elements, with torch's gradient.

    Along dims the gradient divides by a negative divisor. Over all elements the gradient is
    infinite where the distance is not 0, as the slope of a root at 0, and NaN elsewhere.
    """
    if divisor == 0 and over is not None and wide.ndim:
        return squares / 0
    value = record("detach", squares / 0)
    if over is not None and wide.ndim:
        return value + (squares - record("detach", squares)) / divisor
    root = ROWS["sqrt"](wide - record("detach", wide))
    return value + sum(root * pointwise.where(ROWS["eq"](wide, centre), 0.0, 1.0), over, keepdim)


def _squared_distance(x: Handle, centre: Handle) -> Handle:
    if not x.dtype.is_complex:
        return record("squared_distance", x, centre)
    with again(x, is_more=True):
        distance = x - centre
    return squared(distance)


def _root(x: Handle, root: Callable[[Handle], Handle]) -> Handle:
    """Return a root with slope 0 at 0 instead of infinity, as torch's norms have."""
    is_zero = ROWS["eq"](x, 0)
    return pointwise.where(is_zero, 0.0, root(pointwise.where(is_zero, 1.0, x)))


def _spread(name: str, has_root: bool, has_mean: bool, doc: str) -> Operation:
    def function(
        x: Handle,
        dim: Dims = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
        dims: Integers | None = None,
    ) -> Handle | tuple[Handle, Handle]:
        over = checked(x, dim, dims)
        given = in_f32(x) if has_root and not has_mean else x
        power, centre = _moments(given, over, unbiased, keepdim, correction)
        spread = back(_root(power, ROWS["sqrt"]) if has_root else power, x, True)
        if not has_mean:
            return spread
        return spread, back(centre if keepdim else _without(centre, over), x)

    return named(name, doc + _SPREAD, function)


_OVER = "over dims (all by default)"
_SPREAD = """

    Args:
        x: floating or complex numbers; of complex ones the result is real.
        dim: one or several; `dims` is another name.
        unbiased: True stands for correction=1 (the default), False for correction=0.
        keepdim: keep reduced dims with extent 1.
        correction: the number that is subtracted from the number of elements.
        dims: another name of dim.
    """
_VAR = f"Variance {_OVER}: squared distances from the mean over n - correction."
_STD = f"Standard deviation {_OVER}: the square root of `var`."
_VAR_MEAN = f"The variance as `var` has it, and the mean, {_OVER}."
_STD_MEAN = f"The standard deviation as `std` has it, and the mean, {_OVER}."
var, std = _spread("var", False, False, _VAR), _spread("std", True, False, _STD)
var_mean = _spread("var_mean", False, True, _VAR_MEAN)
std_mean = _spread("std_mean", True, True, _STD_MEAN)


def logsumexp(
    x: Handle, dim: Dims = None, keepdim: bool = False, *, dims: Integers | None = None
) -> Handle:
    """log(sum(exp(x))) over dims (all by default), without overflow."""
    over = checked(x, dim, dims)
    x = floating(x)
    with again(x):
        wide = in_f32(x)
    total = log_of_sum(wide, over)
    return back(total if keepdim else _without(total, over), x)


def _without(x: Handle, over: tuple[int, ...] | None) -> Handle:
    """Remove reduced dims that were kept so far."""
    gone = tuple(range(x.ndim)) if over is None else over
    return record("squeeze", x, dims=gone) if gone else x


def norm(
    x: Handle,
    p: float | str = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    dims: Integers | None = None,
) -> Handle:
    """The p-norm of the elements along dims (of all by default), also of a matrix ("fro": 2)."""
    if isinstance(p, str) and p != "fro":
        raise DefinitionError(
            f"norm of %{x.name} with p={p!r}",
            because="a norm is that of all elements along the dims",
            hint='a number, or "fro", which is 2',
        )
    over = checked(x, dim, dims)
    wide = in_f32(with_fractions(as_dtype(x, dtype) if dtype is not None else x))
    result = _norm(wide, 2.0 if p == "fro" else float(p), over, keepdim)
    return back(result, x, True) if dtype is None else as_dtype(result, dtype.to_real())


def _norm(x: Handle, p: float, over: Dims, keepdim: bool) -> Handle:
    if p == math.inf:
        return amax(ROWS["abs"](x), over, keepdim)
    if p == -math.inf:
        return amin(ROWS["abs"](x), over, keepdim)
    if p == 0:
        return cast(sum(ROWS["ne"](x, 0), over, keepdim), x.dtype.to_real())
    if p == 1:
        return sum(ROWS["abs"](x), over, keepdim)
    if p == 2:
        return _root(sum(squared(x), over, keepdim), ROWS["sqrt"])
    if p < 0:  # the norm of infinities alone is infinite
        return sum(_powers(x, p), over, keepdim) ** (1.0 / p)
    return _root(sum(_powers(x, p), over, keepdim), lambda total: total ** (1.0 / p))


def _powers(x: Handle, p: float) -> Handle:
    """Return abs(x) ** p; for p below 1 the slope at 0 is 0, as for torch's norms."""
    size = ROWS["abs"](x)
    if p > 1:
        return size**p
    is_zero = ROWS["eq"](size, 0)
    at_zero = 0.0 if p > 0 else math.inf
    return pointwise.where(is_zero, at_zero, pointwise.where(is_zero, 1.0, size) ** p)
