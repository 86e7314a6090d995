"""Make tensors of numbers where they are read, instead of sending them.

    %y: f32[8,4] (tp=S0) = full_like(%x, 0)         # lies as %x, and reads nothing of it
    %z: f32[8,4] m1(tp=S1)! = set(%y)
->
    %y: f32[8,4] (tp=S0) = full(0, shape=[8,4])
    %z: f32[8,4] m1(tp=S1)! = full(0, shape=[8,4])

Two passes: `alone` as soon as all layouts are known, `where_read` before sets exist.
"""

from __future__ import annotations

from dataclasses import replace

from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout
from mdfuse.passes.strategy import read_layouts
from mdfuse.reshard import cost


def alone(fusion: Fusion) -> Fusion:
    """Return the fusion with each `full_like` turned into a `full`, which reads no tensor."""
    return replace(fusion, exprs=tuple(_alone(e, fusion) for e in fusion.exprs))


def _alone(expr: Expr, fusion: Fusion) -> Expr:
    if expr.op != "full_like" or not (out := fusion.values[expr.output]).is_tensor:
        return expr
    attrs = (("shape", out.shape), ("dtype", out.dtype))
    return replace(expr, op="full", inputs=expr.inputs[1:], attrs=attrs)


def where_read(fusion: Fusion) -> Fusion:
    """Return the fusion with tensors of numbers made in each layout that is read, not sent."""
    values, producers = dict(fusion.values), fusion.producers
    created = {x for x, e in producers.items() if TABLE[e.op].is_creation}
    if not created:
        return fusion
    exprs: list[Expr] = []
    copies: dict[tuple[str, Layout], str] = {}
    for expr in fusion.exprs:
        wanted, out = dict[str, Layout](), values[expr.outputs[0]]
        if not created.isdisjoint(expr.reads) and out.is_tensor and out.stream is None:
            wanted = {
                name: layout
                for name, layout in read_layouts(expr, fusion).items()
                if name in created and _is_sent(fusion.values[name], layout)
            }
        if wanted and expr.op == "set":
            (name,) = wanted
            exprs.append(replace(producers[name], outputs=expr.outputs, source=expr.source))
            continue
        names: dict[str, str] = {}
        for name, layout in wanted.items():
            if (name, layout) not in copies:
                copy = copies[name, layout] = fresh_name(values, name)
                values[copy] = replace(values[name], name=copy, layout=layout, is_law=False)
                exprs.append(replace(producers[name], outputs=(copy,)))
            names[name] = copies[name, layout]
        exprs.append(expr.reading(names))
    return replace(fusion, values=values, exprs=tuple(exprs))


def _is_sent(value: Value, layout: Layout) -> bool:
    """Return whether ranks would have to communicate to read a value in this layout."""
    before = value.layout
    if before is None or layout.partial_axes or before == layout or value.stream is not None:
        return False
    return before.mesh != layout.mesh or cost(before, layout, value.shape) > 0
