"""Elements in order along a dim; scans: cumulative sums, products, extremes; order statistics.

Every rank gathers the dim, except for a cumulative sum of equal parts, which adds the sums of
earlier parts; other dims may be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, extremes, parts, reductions, views
from mdfuse.frontend.ops.pointwise import ROWS, cast, lerp, where
from mdfuse.frontend.ops.recording import (
    Dims,
    Integers,
    Operation,
    as_dtype,
    back,
    checked,
    in_f32,
    is_inexact,
    named,
    own_place,
    place,
    real_only,
    record,
    record_several,
    shown,
)

# -- in order --------------------------------------------------------------------------------------
# Elements and indices come from one expression. Along a dim split in equal parts, `topk` takes the
# largest of each part first, so that few elements are sent; otherwise every rank gathers the dim.


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
    at = _place_of_rank("topk", x, k, dim, 0)
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


def _place_of_rank(name: str, x: Handle, k: int, dim: int, least: int) -> int:
    """Return a dim, counted from 0, that has at least k elements."""
    at, n = place(x, dim), x.shape[dim] if x.ndim else 1
    if not least <= k <= n:
        raise DefinitionError(
            f"{name} of {shown(x)} along dim {dim} with k={k}",
            because=f"there are {n} elements along that dim",
            hint=f"a k from {least} to {n}",
        )
    return at


# -- running ------------------------------------------------------------------------------------


def _running(op: str, doc: str) -> Operation:
    def function(x: Handle, dim: int, *, dtype: torch.dtype | None = None) -> Handle:
        at = place(x, dim)
        if dtype == torch.bool:
            raise DefinitionError(
                f"{op} of {shown(x)} with dtype=torch.bool",
                because="as in torch, truth values do not add up to one",
                hint="dtype=torch.int64, or leave it out",
            )
        if dtype is None and not is_inexact(x):
            dtype = torch.int64
        x = x if dtype is None or dtype == x.dtype else cast(x, dtype)
        scanned = record(op, x, dim=at)  # integers become int64
        return scanned if dtype in (None, scanned.dtype) else cast(scanned, dtype)

    return named(op, doc, function)


cumsum = _running("cumsum", "The sum of the elements along a dim up to each.")
cumprod = _running("cumprod", "The product of the elements along a dim up to each.")


def logcumsumexp(x: Handle, dim: int) -> Handle:
    """log(cumsum(exp(x))) along a dim, without overflow."""
    at = place(x, dim)
    if not x.dtype.is_floating_point:
        raise DefinitionError(
            f"logcumsumexp of {shown(x)}",
            because="it takes floating numbers",
            hint="x.to(torch.float32)",
        )
    return back(record("logcumsumexp", in_f32(x), dim=at), x)


class Running(NamedTuple):
    """The results of `cummax` and `cummin`, as in torch: running extremes, and their indices."""

    values: Handle
    indices: Handle


def cummax(x: Handle, dim: int) -> Running:
    """The largest element along a dim up to each, and where it stands (of equal ones the last)."""
    return Running(*record_several("cummax", x, dim=place(x, dim)))


def cummin(x: Handle, dim: int) -> Running:
    """The smallest element along a dim up to each, and where it stands (of equal ones the last)."""
    return Running(*record_several("cummin", x, dim=place(x, dim)))


# -- at a rank in order --------------------------------------------------------------------------


def kthvalue(x: Handle, k: int, dim: int = -1, keepdim: bool = False) -> Ordered:
    """The k-th smallest element along a dim, from 1 on, and a place where it stands."""
    return _ranked(x, k - 1, _place_of_rank("kthvalue", x, k, dim, 1), keepdim)


def _ranked(x: Handle, rank: int, at: int, keepdim: bool) -> Ordered:
    in_order = sort(x, at, stable=True)
    if not x.ndim:
        return in_order
    cut = (parts.narrow(y, at, rank, 1) for y in in_order)
    return Ordered(*(y if keepdim else record("squeeze", y, dims=(at,)) for y in cut))


def _median(name: str, skips_nan: bool) -> Operation:
    def function(x: Handle, dim: int | None = None, keepdim: bool = False) -> Handle | Ordered:
        if not x.numel() or x.dtype == torch.bool:
            raise DefinitionError(
                f"{name} of {shown(x)}", because="some numbers have one", hint="not of nothing"
            )
        if dim is None:
            middle = _middle(views.flatten(x), 0, False, skips_nan).values
            return _shared_by_equals(x, middle) if x.dtype.is_floating_point else middle
        return _middle(x, place(x, dim), keepdim, skips_nan)

    doc = "The lower of the middle elements (of all, or with their places along a dim)"
    end = "; NaNs are left out." if skips_nan else "; NaN where there is one."
    return named(name, doc + end, function)


def _shared_by_equals(x: Handle, value: Handle) -> Handle:
    """Return a value of x, whose gradient is divided evenly among equal elements."""
    value = record("detach", value)
    other = where(ROWS["isnan"](value), value, -math.inf)
    return reductions.amax(where(ROWS["eq"](x, value), x, other))


def _middle(x: Handle, at: int, keepdim: bool, skips_nan: bool) -> Ordered:
    n = x.shape[at] if x.ndim else 1
    if not x.dtype.is_floating_point or not x.ndim:
        return _ranked(x, (n - 1) // 2, at, keepdim)
    if not skips_nan:
        strange = reductions.any(ROWS["isnan"](x), at, True)
        first = extremes.argmax(x, at, True)  # a NaN is the largest
        indices = where(strange, first, _ranked(x, (n - 1) // 2, at, True).indices)
        both = (record("gather", indices, x, along=at), indices)
        return Ordered(*(y if keepdim else record("squeeze", y, dims=(at,)) for y in both))
    in_order = sort(x, at, stable=True)
    count = reductions.sum(ROWS["logical_not"](ROWS["isnan"](x)), at, True)
    rank = ROWS["maximum"]((count - 1) // 2, 0)
    cut = (record("gather", rank, y, along=at) for y in in_order)
    return Ordered(*(y if keepdim else record("squeeze", y, dims=(at,)) for y in cut))


median, nanmedian = _median("median", False), _median("nanmedian", True)


def mode(x: Handle, dim: int = -1, keepdim: bool = False) -> Ordered:
    """The most frequent element along a dim (of several the smallest), and where it stands last."""
    at = place(x, dim)
    if not x.ndim:
        return Ordered(views.set(x), creations.zeros_like(x, dtype=torch.int64))
    n = x.shape[at]
    if not n:
        raise DefinitionError(f"mode of {shown(x)}", because="nothing has none", hint="not of it")
    in_order = sort(x, at, stable=True)
    values = in_order.values
    alike = ROWS["eq"](views.unsqueeze(values, at + 1), views.unsqueeze(values, at))
    counts = reductions.sum(alike, at + 1)
    first, count = extremes.argmax(counts, at, True), reductions.amax(counts, at, True)
    last = first + ROWS["maximum"](count - 1, 0)  # a NaN equals nothing, not even itself
    cut = (record("gather", last, y, along=at) for y in in_order)
    return Ordered(*(y if keepdim else record("squeeze", y, dims=(at,)) for y in cut))


_WAYS = ("linear", "lower", "higher", "nearest", "midpoint")


def quantile(
    x: Handle,
    q: float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Handle:
    """Below which a share q of the elements is, of all or along a dim; NaN where there is one.

    Args:
        x: floats of 32 or 64 bits.
        q: a number from 0 to 1.
        dim: along which; it is whole on every rank.
        keepdim: keep the dim with extent 1.
        interpolation: between two elements: "linear", "lower", "higher", "nearest", "midpoint".
    """
    is_taken = x.dtype in (torch.float32, torch.float64) and 0 <= q <= 1 and x.numel()
    if not is_taken or interpolation not in _WAYS:
        raise DefinitionError(
            f"quantile of {shown(x)} with q={q} and interpolation={interpolation!r}",
            because="q is a number from 0 to 1, the elements are float32 or float64, and it is one "
            "of " + ", ".join(_WAYS),
            hint="torch.stack([quantile(x, q) for q in …]) for several",
        )
    given = checked(x, dim)
    flat = views.flatten(x) if given is None else x
    at = 0 if given is None else place(x, dim if dim is not None else 0)
    if not x.ndim:
        return record("set", x)
    in_order = sort(flat, at).values
    between = _between(in_order, q, at, interpolation)
    strange = reductions.any(ROWS["isnan"](flat), at, True)
    between = where(strange, parts.narrow(in_order, at, flat.shape[at] - 1, 1), between)
    if given is None:
        return views.reshape(between, (1,) * x.ndim if keepdim else ())
    return between if keepdim else record("squeeze", between, dims=(at,))


def _between(in_order: Handle, q: float, at: int, interpolation: str) -> Handle:
    rank = torch.tensor(q, dtype=in_order.dtype).item() * (in_order.shape[at] - 1)
    if in_order.dtype == torch.float32:
        rank = torch.tensor(rank, dtype=torch.float32).item()
    lower, higher = math.floor(rank), math.ceil(rank)
    one = {"lower": lower, "higher": higher, "nearest": round(rank)}.get(interpolation)
    if one is not None or lower == higher:
        return parts.narrow(in_order, at, lower if one is None else one, 1)
    share = 0.5 if interpolation == "midpoint" else rank - lower
    first, second = (parts.narrow(in_order, at, i, 1) for i in (lower, higher))
    return lerp(first, second, share)


# -- sums that leave something out ---------------------------------------------------------------


def _skipping(name: str, over: Callable[..., Handle], doc: str) -> Operation:
    def function(
        x: Handle,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        dims: Integers | None = None,
    ) -> Handle:
        real_only(name, x)
        is_float = x.dtype.is_floating_point
        counted = where(ROWS["isnan"](x), 0.0, x) if is_float else x
        if over is reductions.sum:
            return over(counted, dim, keepdim, dtype, dims=dims)
        counted = counted if dtype is None else as_dtype(counted, dtype)
        total = reductions.sum(in_f32(counted), dim, keepdim, dims=dims)
        count = reductions.sum(ROWS["eq"](x, x), dim, keepdim, dims=dims)
        return as_dtype(total / count, counted.dtype)

    return named(name, doc, function)


nansum = _skipping("nansum", reductions.sum, "Sum over dims (all by default) without NaNs.")
nanmean = _skipping("nanmean", reductions.mean, "Mean over dims (all by default) without NaNs.")


class Ends(NamedTuple):
    """The result of `aminmax`, as in torch."""

    min: Handle
    max: Handle


def aminmax(x: Handle, *, dim: int | None = None, keepdim: bool = False) -> Ends:
    """The smallest and the largest element, of all or along a dim."""
    return Ends(reductions.amin(x, dim, keepdim), reductions.amax(x, dim, keepdim))


def renorm(x: Handle, p: float, dim: int, maxnorm: float) -> Handle:
    """Each place of a dim made smaller where its p-norm is above maxnorm."""
    at = own_place(x, dim)
    if x.ndim < 2 or p <= 0 or maxnorm < 0 or not x.dtype.is_floating_point:
        raise DefinitionError(
            f"renorm of {shown(x)} with p={p} and maxnorm={maxnorm}",
            because="it takes floats of two dims or more, a positive p and a maxnorm from 0 on",
            hint="normalize(x, p, dim)",
        )
    others = tuple(d for d in range(x.ndim) if d != at)
    wide = in_f32(x)
    is_above = ROWS["gt"](reductions.norm(record("detach", wide), p, others, True), maxnorm)
    above = where(is_above, wide, 0.0)  # no slope of a norm reaches the others, which may be NaN
    factor = maxnorm / (reductions.norm(above, p, others, True) + 1e-7)
    return back(where(is_above, above * factor, wide), x)
