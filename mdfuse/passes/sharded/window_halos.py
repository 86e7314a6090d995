"""Gradients of attention with a window: the keys before a rank's own get theirs from later ranks.

    %dq, %dk, %dv = attention_grad(%q, %k, %v, %y, %l, %ct, window=5, …)      # all are (cp=S2)
->
    %b, %c, %dq, %e, %f = attention_halo_grad(…, parts=4, chunk=6, halo=4)    # %b, %c: (cp=S0)
    %dk = add_halos(%e, %b, chunk=6)                                          # likewise %dv

Keys and values come to a rank as to the attention itself: those that the windows of its rows reach.
So no rank has all of them, and the bytes of both ways grow with the window alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mdfuse.ir.graph import Expr, fresh_name
from mdfuse.passes.rewriting import Maker, Rule
from mdfuse.passes.sharded.split_attention import ROWS, SplitAttention


def rules(split: SplitAttention) -> Iterator[tuple[str, Rule]]:
    """Yield first result -> rule, of the gradients of an attention whose windows reach."""
    for e in split.gradients if split.has_halos else ():
        yield e.outputs[0], partial(_backward, split=split)


def _backward(maker: Maker, by: Expr, split: SplitAttention) -> None:
    (axis,), rows = split.axes, split.shape(split.operands[0])[ROWS]
    chunk = -(-rows // split.rows.mesh.axis_size(axis))
    parts = -(-rows // chunk)  # without those of ranks that have no rows
    halo = min(by.kwargs["window"] - 1, (parts - 1) * chunk)
    names = [_like(maker, f"{x}.before", x, (parts, halo)) for x in by.outputs[1:]]
    local = [_like(maker, f"{x}.own", x, None) for x in by.outputs[1:]]
    how = (*by.attrs, ("parts", parts), ("chunk", chunk), ("halo", halo))
    outputs = (*names, by.outputs[0], *local)
    maker.exprs.append(replace(by, op="attention_halo_grad", outputs=outputs, attrs=how))
    for x, before, old in zip(local, names, by.outputs[1:], strict=True):
        blocks = [_block(maker, by, before, at, chunk) for at in range(0, halo, chunk)]
        if not blocks:
            maker.exprs.append(replace(by, op="set", inputs=(x,), outputs=(old,), attrs=()))
            continue
        added = replace(by, op="add_halos", inputs=(x, *blocks), outputs=(old,))
        maker.exprs.append(replace(added, attrs=(("chunk", chunk),)))
    for x in by.outputs:
        if not maker.values[x].is_law:
            maker.values[x] = replace(maker.values[x], layout=None)


def _like(maker: Maker, name: str, old: str, before: tuple[int, int] | None) -> str:
    """Add a value like a gradient of keys, or of those before each part."""
    value, name = maker.values[old], fresh_name(maker.values, name)
    shape = value.shape
    if before is not None:
        shape = (before[0], *shape[:ROWS], before[1], shape[-1])
    value = replace(value, name=name, shape=shape, layout=None, is_law=False)
    maker.values[name] = replace(value, like=None, copies=())
    return name


def _block(maker: Maker, by: Expr, before: str, behind: int, chunk: int) -> str:
    """Append the rows that belong to one of the parts before, counted from the last ones."""
    shape = maker.values[before].shape
    end = shape[ROWS] - behind
    start = max(end - chunk, 0)
    if (start, end) == (0, shape[ROWS]):
        return before
    starts, ends = [0] * len(shape), [*shape]
    starts[ROWS], ends[ROWS] = start, end
    steps = (1,) * len(shape)
    return maker.op(by, "slice", before, starts=(*starts,), ends=(*ends,), steps=steps)
