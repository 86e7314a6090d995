"""Gradients of writes: x gets the cotangent of what stays, the source that of its last writes."""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, views
from mdfuse.frontend.ops.lookup_parts import at_places, first_places
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.slice_cotangents import sliced
from mdfuse.frontend.vjps.table import Applied, eq, rule, where


@rule("index_copy")
def _index_copy(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """x gets the cotangent of untouched places, the source that of the last write per index."""
    index, dim, (count,) = e[0], e.attrs["along"], e.shape(0)
    zeros = creations.zeros_like(e[1]) if e.wants(2) else None
    of_x = None if zeros is None else record("index_copy", index, zeros, ct, along=dim)
    if not e.wants(1) or not count:
        return None, None, of_x
    of_source = record("index_select", index, ct, along=dim)
    if count > 1:
        places = creations.arange(count)
        last = record(
            "scatter_reduce", index, places, shape=(e.shape(2)[dim],), along=0, reduce="max"
        )
        is_last = eq(record("index_select", index, last, along=0), places)
        of_source = where(
            views.reshape(is_last, (count, *(1,) * (ct.ndim - 1 - dim))), of_source, 0.0
        )
    return None, of_source, of_x


@rule("index_put")
def _index_put(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dims, count = e.attrs["dims"], e.count - 2
    at, none = [e[n] for n in range(count)], [None] * count
    of_x: Handle | None = ct
    if not e.attrs.get("accumulate"):
        of_x = None
        if e.wants(count + 1):
            of_x = record("index_put", *at, creations.zeros_like(e[count]), ct, dims=dims)
    if not e.wants(count):
        return *none, None, of_x
    others = [d for d in range(ct.ndim) if d not in dims]
    of_source = at_places(views.permute(ct, (*dims, *others)), 0, at)
    (n,) = e.shape(0)
    if not e.attrs.get("accumulate") and n != 1:
        places = creations.arange(n)
        table = creations.zeros([ct.shape[d] for d in dims], dtype=places.dtype)
        last = record("index_put", *at, places, table, dims=tuple(range(count)))
        is_last = eq(at_places(last, 0, at), places)
        of_source = where(views.reshape(is_last, (n, *(1,) * len(others))), of_source, 0.0)
    return *none, of_source, of_x


@rule("scatter")
def _scatter(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    index, dim = e[0], e.attrs["along"]
    of_x = None
    if e.wants(2):
        of_x = record("scatter", index, creations.zeros_like(e[1]), ct, along=dim)
    if not e.wants(1):
        return None, None, of_x
    of_source = record("gather", index, first_places(ct, index.shape, dim), along=dim)
    n = index.shape[dim]
    shape = (n, *(1,) * (ct.ndim - 1 - dim))
    places = views.expand(views.reshape(creations.arange(n), shape), index.shape)
    table = creations.zeros(
        [m if d == dim else k for d, (m, k) in enumerate(zip(ct.shape, index.shape, strict=True))],
        dtype=places.dtype,
    )
    last = record("scatter", index, places, table, along=dim)
    is_last = eq(record("gather", index, last, along=dim), places)
    return None, where(is_last, of_source, 0.0), of_x


@rule("slice_scatter")
def _slice_scatter(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    starts, steps = e.attrs["starts"], e.attrs["steps"]
    of_x = None
    if e.wants(1):
        zeros = creations.zeros_like(e[0])
        of_x = record("slice_scatter", zeros, ct, starts=starts, steps=steps)
    if not e.wants(0):
        return None, of_x
    return sliced(ct, starts, steps, e.shape(0)), of_x
