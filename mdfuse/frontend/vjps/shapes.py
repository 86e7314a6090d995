"""Gradients of ops that move numbers: views, parts, what is joined."""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.extents.extent import are_same, larger
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, indexing, parts, views
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.table import Applied, rule


@rule("set", "stride_order")
def _set(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (e.returned(ct),)


@rule("permute")
def _permute(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dims = [d % ct.ndim for d in e.attrs["dims"]]
    return (views.permute(ct, [dims.index(d) for d in range(ct.ndim)]) if dims else ct,)


@rule("reshape", "unsqueeze", "squeeze")
def _reshape(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (record("reshape", ct, shape=e.shape(0)),)


@rule("expand")
def _expand(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (ct,)  # summed by the caller


@rule("slice")
def _slice(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Put the cotangent into zeros, dim by dim: apart by the step first, then at the start."""
    shape = e.shape(0)
    for d, (start, step) in enumerate(zip(e.attrs["starts"], e.attrs["steps"], strict=True)):
        if step != 1:
            apart = views.unsqueeze(ct, d + 1)
            apart = _padded(apart, d + 1, 0, step - 1)
            ct, rest = views.flatten(apart, d, d + 1), shape[d] - start
            ct = _padded(ct, d, 0, larger(rest - ct.shape[d], 0))
            ct = _first(ct, d, rest)
        ct = _padded(ct, d, start, shape[d] - start - ct.shape[d])
    return (ct,)


def _padded(x: Handle, dim: int, before: int, behind: int) -> Handle:
    """Join zeros to both ends of a dim."""

    def zeros(n: int) -> list[Handle]:
        shape = (*x.shape[:dim], n, *x.shape[dim + 1 :])
        return [] if are_same(n, 0) else [creations.full(shape, 0, dtype=x.dtype)]

    pieces = [*zeros(before), x, *zeros(behind)]
    return parts.cat(pieces, dim) if len(pieces) > 1 else x


def _first(x: Handle, dim: int, length: int) -> Handle:
    """The first places of a dim, without a decision on how many there are."""
    if are_same(x.shape[dim], length):
        return x
    ends = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return record("slice", x, starts=(0,) * x.ndim, ends=ends, steps=(1,) * x.ndim)


@rule("cat")
def _cat(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dim, found, start = e.attrs["dim"] % ct.ndim, [], 0
    for i in range(e.count):
        end = start + e.shape(i)[dim]
        where = (*[slice(None)] * dim, slice(start, end))
        found.append(indexing.index(ct, where) if e.wants(i) else None)
        start = end
    return found
