"""Gradients of lookups, indexed reductions, cumulative ops and contractions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import reductions, views
from mdfuse.frontend.ops.recording import back, in_f32, record
from mdfuse.frontend.vjps.table import (
    ORDERS,
    Applied,
    eq,
    exp,
    finite,
    gt,
    log,
    logical_and,
    lt,
    product_of_others,
    rule,
    symmetric,
    where,
    widely,
)

# -- lookups -------------------------------------------------------------------------------------


@rule("index_select")
def _index_select(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return None, record("index_sum", e[0], ct, shape=e.shape(1), along=e.attrs["along"])


@rule("index_sum")
def _index_sum(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return None, record("index_select", e[0], ct, along=e.attrs["along"])


@rule("gather")
def _gather(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dim = e.attrs["along"]
    return None, record("scatter_reduce", e[0], ct, shape=e.shape(1), along=dim, reduce="sum")


@rule("scatter_reduce")
def _scatter(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dim, reduce = e.attrs["along"], e.attrs["reduce"]
    if reduce == "sum":
        return None, record("gather", e[0], ct, along=dim)
    return None, (_through_product(e, ct) if reduce == "prod" else _through_extreme(e, ct))


def _at(e: Applied, x: Handle) -> Handle:
    """Return the value at the target place of each element."""
    return record("gather", e[0], x, along=e.attrs["along"])


def _summed(e: Applied, x: Handle) -> Handle:
    shape, dim = e.attrs["shape"], e.attrs["along"]
    return record("scatter_reduce", e[0], x, shape=shape, along=dim, reduce="sum")


def _through_extreme(e: Applied, ct: Handle) -> Handle:
    """Divide the cotangent evenly among equal extremes."""
    is_there = eq(e[1], _at(e, e.y))
    wide = in_f32(ct)  # 16 bits cannot count many equals
    equals = _summed(e, record("cast", is_there, dtype=wide.dtype))
    return where(is_there, _at(e, back(wide / equals, ct)), 0.0)


def _through_product(e: Applied, ct: Handle) -> Handle:
    shape, dim = e.attrs["shape"], e.attrs["along"]

    def product(x: Handle) -> Handle:
        products = record("scatter_reduce", e[0], x, shape=shape, along=dim, reduce="prod")
        return _at(e, products)

    others = product_of_others(e[1], product=product, total=lambda x: _at(e, _summed(e, x)))
    return _at(e, ct) * others


# -- along a dim ---------------------------------------------------------------------------------


@rule("flip")
def _flip(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (record("flip", ct, dims=e.attrs["dims"]),)


def _from_behind(x: Handle, dim: int) -> Handle:
    """Return the reverse cumulative sum."""
    if not x.ndim:
        return x
    turned = record("cumsum", record("flip", x, dims=(dim,)), dim=dim)
    return record("flip", turned, dims=(dim,))


@rule("cumsum")
def _cumsum(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (_from_behind(ct, e.attrs["dim"]),)


@rule("cumprod")
@widely
def _cumprod(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Each element gets the sum of later products without it.

    As `product_of_others`: by the product of nonzero elements, and a polynomial of the zeros.
    """
    x, dim = e[0], e.attrs["dim"]
    if not x.ndim:
        return (ct,)
    is_zero = eq(x, 0)
    nonzero, at_zeros = where(is_zero, 1.0, x), where(is_zero, x, 0.0)
    count = record("cumsum", record("cast", is_zero, dtype=ct.dtype), dim=dim)
    product = ct * record("cumprod", nonzero, dim=dim)
    with_n = [where(eq(count, n), product, 0.0) for n in range(ORDERS + 1)]
    zeros = [*symmetric(at_zeros, lambda y: record("cumsum", y, dim=dim))]

    def behind(first: int) -> Handle:
        """The products without `first` of the zeros that they have."""
        parts = [
            finite(with_n[first + n]) * of_n
            for n, of_n in enumerate(zeros, 1)
            if first + n <= ORDERS
        ]
        return _from_behind(sum(parts, with_n[first]), dim)

    at = behind(ORDERS)
    for n in range(ORDERS - 1, 0, -1):
        at = behind(n) - at_zeros * finite(at)
    is_hidden = logical_and(gt(count, 0), record("isnan", x))
    return (where(is_zero, at, behind(0) / where(is_hidden, 1.0, nonzero)),)


@rule("logcumsumexp")
@widely
def _logcumsumexp(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """exp(x) times the reverse cumulative sum of ct * exp(-y), in logarithms, per sign of ct.

    A ct of 0 becomes a small number on both sides, which cancels, so that it has a derivative.
    """
    if not e.y.ndim:
        return (ct,)
    dims, exponentials = (e.attrs["dim"],), []
    is_zero, little = eq(ct, 0), 1e-18 if ct.dtype == torch.float32 else 1e-150
    is_nothing = logical_and(is_zero, eq(e.y, -math.inf))
    for part, zero in ((ct, ct + little), (-ct, little)):
        size = log(where(is_zero, zero, where(lt(part, 0), 1.0, part))) - e.y
        size = where(lt(part, 0), -math.inf, where(is_nothing, -math.inf, size))
        behind = record("logcumsumexp", record("flip", size, dims=dims), dim=dims[0])
        exponentials.append(exp(record("flip", behind, dims=dims) + e[0]))
    return (exponentials[0] - exponentials[1],)


# -- products ------------------------------------------------------------------------------------


@rule("contract")
def _contract(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    labels = e.attrs["left"], e.attrs["right"]
    return tuple(_factor(e, ct, labels, at) if e.wants(at) else None for at in (0, 1))


def _factor(e: Applied, ct: Handle, labels: Sequence[tuple[int, ...]], mine: int) -> Handle:
    """Contract the cotangent with the other factor over the dims that this one lacks."""
    own_labels, other, result_labels = labels[mine], labels[1 - mine], e.attrs["kept"]
    shared = [x for x in own_labels if x in result_labels or x in other]
    contracted = record(
        "contract", ct, e[1 - mine], left=result_labels, right=other, kept=tuple(shared)
    )
    for d, x in enumerate(own_labels):  # a summed dim of this factor alone
        if x not in shared:
            contracted = views.unsqueeze(contracted, d)
    for d, n in enumerate(e.shape(mine)):  # a broadcast dim
        if contracted.shape[d] != n and n == 1:
            contracted = reductions.sum(contracted, d, True)
    return (
        contracted if contracted.shape == e.shape(mine) else views.expand(contracted, e.shape(mine))
    )
