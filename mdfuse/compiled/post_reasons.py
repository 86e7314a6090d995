"""The reasons of posts, as `explain` tells them."""

from __future__ import annotations

from mdfuse.communication import Communication
from mdfuse.hir.program import Instruction


def post_reason(i: Instruction) -> str:
    """Return the reason for a post or a receive."""
    if i.comm is not None:
        note = f" ({i.source.note})" if i.source is not None and i.source.note else ""
        return f"{i.comm}: {i.comm.source} -> {i.comm.destination}, {_reason(i.comm)}{note}"
    along = f" along {i.kwargs['axis']}" if "axis" in i.kwargs else ""
    return f"Recv %{i.reads[0]} from {i.kwargs['from']}{along}, which sends it: a ring"


def _reason(c: Communication) -> str:
    if c.kind == "ReduceExchange":
        return "no one collective does this; each rank receives the terms of what it is to have"
    if c.kind == "Exchange":
        return "no one collective does this; each rank receives just what it lacks"
    if c.is_along_axes:
        return f"the placement changes along {' and '.join(c.axes)}"
    return "the meshes differ"
