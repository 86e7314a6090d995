"""Compute what a ring sends in the pieces in which it is sent, so that the first goes early.

    %t: f32[64,32] (tp=S0) = mul(%x, 0.5)
    %t.whole: f32[64,32] (tp=R, stream(0,4,rotate=tp)) = set(%t)
->
    %t: f32[64,32] (tp=S0, stream(0,2)) = mul(%x, 0.5)
    %t.whole: f32[64,32] (tp=R, stream(0,4,rotate=tp)) = set(%t)

Element-wise work and what goes row by row, as a norm does, that nothing else reads. Where ranks
have pieces of several lengths it is left as it is: they would not begin with the same piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.stream import Stream
from mdfuse.passes.strategy import dim_map
from mdfuse.passes.streams import operand_streams

#: Ops whose rows are computed each by itself, besides element-wise ones.
_ROW_WISE = ("layer_norm", "rms_norm", "softmax", "log_softmax")


def streams(fusion: Fusion, ring: Expr, stream: Stream) -> Mapping[str, Stream]:
    """Return value -> its stream where what a ring sends is computed in pieces; empty: it is not.

    What is computed from others comes before these.

    Args:
        fusion: with layouts and sets.
        ring: the set that gathers.
        stream: of each shard: the dim that is gathered, and in how many pieces it is sent.
    """
    (sent,) = ring.reads
    wanted, found = {sent: {stream}}, dict[str, Stream]()
    if sent in fusion.outputs or not _is_even(fusion, sent, stream):
        return found
    waiting = [sent]
    while waiting:
        name = waiting.pop()
        expr, some = fusion.producers.get(name), wanted[name]
        is_ready = name == sent or {r.outputs[0] for r in fusion.consumers[name]} <= found.keys()
        if expr is None or name in found or len(some) != 1 or not is_ready:
            continue  # one of several readers; the last of them comes here again
        if not _may_cut(fusion, expr, *some):
            continue
        (found[name],) = some
        values = {**fusion.values, name: replace(fusion.values[name], stream=found[name])}
        for x, read in zip(expr.inputs, operand_streams(expr, values), strict=True):
            if isinstance(x, str) and read is not None:
                wanted.setdefault(x, set()).add(read)
                waiting.append(x)
    return found


def _is_even(fusion: Fusion, name: str, stream: Stream) -> bool:
    """Whether all ranks have equally many rows of a dim, and each piece has."""
    value = fusion.values[name]
    if value.layout is None or value.layout.blocked or is_symbolic(value.shape[stream.dim]):
        return False
    parts = (value.layout.mesh.axis_size(a) for a in value.layout.split_axes(stream.dim))
    return value.shape[stream.dim] % (math.prod(parts) * stream.count) == 0


def _may_cut(fusion: Fusion, expr: Expr, stream: Stream) -> bool:
    """Whether an expression computes its rows each by itself, and nothing asks for more."""
    value = fusion.values[expr.outputs[0]]
    is_plain = TABLE[expr.op].is_elementwise or expr.op in _ROW_WISE
    if len(expr.outputs) > 1 or not is_plain or not value.is_tensor or value.layout is None:
        return False
    is_free = value.stream is None and not value.is_order_required and not value.expanded
    is_kept = value.name in fusion.outputs or value.name in fusion.reuse
    is_cut = dim_map(expr, fusion.values).result[stream.dim] is not None
    return is_free and not is_kept and is_cut and not value.layout.partial_axes
