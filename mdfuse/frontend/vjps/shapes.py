"""Gradients of ops that move numbers: views, parts, joins."""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import indexing, views
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.table import Applied, rule
from mdfuse.frontend.vjps.windows import Part, Window, sliced


@rule("set", "stride_order")
def _set(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (e.returned(ct),)


@rule("permute")
def _permute(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dims = [d % ct.ndim for d in e.attrs["dims"]]
    return (views.permute(ct, [dims.index(d) for d in range(ct.ndim)]) if dims else ct,)


@rule("reshape", "squeeze")
def _reshape(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (record("reshape", ct, shape=e.shape(0)),)


@rule("unsqueeze")
def _unsqueeze(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Name the removed dims, because a shape alone is ambiguous for dims of extent 1."""
    return (record("squeeze", ct, dims=e.attrs["dims"]),)


@rule("expand")
def _expand(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (ct,)  # summed by the caller


@rule("slice")
def _slice(e: Applied, ct: Handle) -> Sequence[Part | None]:
    return (Window(ct, e.shape(0), e.attrs["starts"], e.attrs["steps"]),)


@rule("slice_grad")
def _slice_grad(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (sliced(ct, e.attrs["starts"], e.attrs["steps"], e.shape(0)),)


@rule("cat")
def _cat(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dim, pieces, start = e.attrs["dim"] % ct.ndim, [], 0
    for i in range(e.count):
        end = start + e.shape(i)[dim]
        where = (*[slice(None)] * dim, slice(start, end))
        pieces.append(indexing.index(ct, where) if e.wants(i) else None)
        start = end
    return pieces
