"""Gradients of ops that move numbers: views, parts, joins."""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import indexing, views
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.slice_cotangents import Window, sliced
from mdfuse.frontend.vjps.table import RULES, Applied, rule

RULES.update(
    {
        "set": lambda e, ct: (e.returned(ct),),
        "stride_order": lambda e, ct: (e.returned(ct),),
        "reshape": lambda e, ct: (record("reshape", ct, shape=e.shape(0)),),
        "squeeze": lambda e, ct: (record("reshape", ct, shape=e.shape(0)),),
        "expand": lambda e, ct: (ct,),  # summed by the caller
        "slice": lambda e, ct: (Window(ct, e.shape(0), e.attrs["starts"], e.attrs["steps"]),),
        "slice_grad": lambda e, ct: (sliced(ct, e.attrs["starts"], e.attrs["steps"], e.shape(0)),),
    }
)


@rule("permute")
def _permute(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dims = [d % ct.ndim for d in e.attrs["dims"]]
    return (views.permute(ct, [dims.index(d) for d in range(ct.ndim)]) if dims else ct,)


@rule("unsqueeze")
def _unsqueeze(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Name the removed dims, because a shape alone is ambiguous for dims of extent 1."""
    return (record("squeeze", ct, dims=e.attrs["dims"]),)


@rule("cat")
def _cat(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dim, pieces, start = e.attrs["dim"] % ct.ndim, [], 0
    for i in range(e.count):
        end = start + e.shape(i)[dim]
        where = (*[slice(None)] * dim, slice(start, end))
        pieces.append(indexing.index(ct, where) if e.wants(i) else None)
        start = end
    return pieces
