"""Gradients of lookups, of what joins by an index, of running sums, contractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import reductions, views
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.table import (
    RULES,
    Applied,
    Rule,
    eq,
    exp,
    gt,
    log,
    logical_and,
    rule,
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
    """What stands at the place that each element was joined to."""
    return record("gather", e[0], x, along=e.attrs["along"])


def _summed(e: Applied, x: Handle) -> Handle:
    shape, dim = e.attrs["shape"], e.attrs["along"]
    return record("scatter_reduce", e[0], x, shape=shape, along=dim, reduce="sum")


def _through_extreme(e: Applied, ct: Handle) -> Handle:
    """Evenly among equals."""
    is_there = eq(e[1], _at(e, e.y))
    equals = _summed(e, record("cast", is_there, dtype=ct.dtype))
    return where(is_there, _at(e, ct / equals), 0.0)


def _through_product(e: Applied, ct: Handle) -> Handle:
    """The product of the others: what is not zero, where at most one is."""
    is_zero = eq(e[1], 0)
    rest = where(is_zero, 1.0, e[1])
    shape, dim = e.attrs["shape"], e.attrs["along"]
    product = _at(e, record("scatter_reduce", e[0], rest, shape=shape, along=dim, reduce="prod"))
    zeros = _at(e, _summed(e, record("cast", is_zero, dtype=ct.dtype)))
    alone = logical_and(is_zero, eq(zeros, 1))
    return _at(e, ct) * where(eq(zeros, 0), product / rest, where(alone, product, 0.0))


# -- along a dim ---------------------------------------------------------------------------------


@rule("flip")
def _flip(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (record("flip", ct, dims=e.attrs["dims"]),)


def _from_behind(x: Handle, dim: int) -> Handle:
    """The sum of what stands here and behind it."""
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
    """Before the first 0 of a row by division; at it by the products without it; behind it 0."""
    x, dim = e[0], e.attrs["dim"]
    if not x.ndim:
        return (ct,)
    is_zero = eq(x, 0)
    zeros = record("cumsum", record("cast", is_zero, dtype=ct.dtype), dim=dim)
    is_first = logical_and(is_zero, eq(zeros, 1))
    without = record("cumprod", where(is_first, 1.0, x), dim=dim)
    before = _from_behind(ct * e.y, dim) / where(is_zero, 1.0, x)
    at = _from_behind(where(gt(zeros, 0), ct * without, 0.0), dim)
    return (where(eq(zeros, 0), before, where(is_first, at, 0.0)),)


@rule("logcumsumexp")
@widely
def _logcumsumexp(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """exp(x) times the sum of ct * exp(-y) from here on, in logarithms, of either sign of ct."""
    if not e.y.ndim:
        return (ct,)
    dims, found = (e.attrs["dim"],), []
    for part in (ct, -ct):
        size = log(where(gt(part, 0), part, 0.0))
        behind = record("logcumsumexp", record("flip", size - e.y, dims=dims), dim=dims[0])
        found.append(exp(record("flip", behind, dims=dims) + e[0]))
    return (found[0] - found[1],)


def _through_running(name: str) -> Rule:
    def made(e: Applied, cts: Sequence[Any]) -> Sequence[Handle | None]:
        ct, places, shape = cts[0], e.results[1], e.shape(0)
        if not shape:
            return (ct,)
        dim = e.attrs["dim"] % len(shape)
        return (record("scatter_reduce", places, ct, shape=shape, along=dim, reduce="sum"),)

    made.__name__ = name
    return made


for _name in ("cummax", "cummin"):
    RULES[_name] = _through_running(_name)


# -- products ------------------------------------------------------------------------------------


@rule("grouped_mm")
def _grouped(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    turned = views.transpose(e[1]) if e.wants(0) else None
    return (
        record("grouped_mm", ct, turned, e[2]) if turned is not None else None,
        record("grouped_mm_grad", e[0], ct, e[2], shape=e.shape(1)) if e.wants(1) else None,
        None,
    )


@rule("grouped_mm_grad")
def _grouped_grad(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (
        record("grouped_mm", e[1], views.transpose(ct), e[2]) if e.wants(0) else None,
        record("grouped_mm", e[0], ct, e[2]) if e.wants(1) else None,
        None,
    )


@rule("contract")
def _contract(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    labels = e.attrs["left"], e.attrs["right"]
    return tuple(_factor(e, ct, labels, at) if e.wants(at) else None for at in (0, 1))


def _factor(e: Applied, ct: Handle, labels: Sequence[tuple[int, ...]], mine: int) -> Handle:
    """The cotangent with the other factor, summed over what this one lacks."""
    own, other, kept = labels[mine], labels[1 - mine], e.attrs["kept"]
    found = [x for x in own if x in kept or x in other]
    made = record("contract", ct, e[1 - mine], left=kept, right=other, kept=tuple(found))
    for d, x in enumerate(own):  # what this factor alone had, and was summed over
        if x not in found:
            made = views.unsqueeze(made, d)
    for d, n in enumerate(e.shape(mine)):  # one that the other factor repeated
        if made.shape[d] != n and n == 1:
            made = reductions.sum(made, d, True)
    return made if made.shape == e.shape(mine) else views.expand(made, e.shape(mine))
