"""Give every value a layout: the user's are laws, the rest is inferred forwards, then backwards.

    %x: f32[8,16] (tp=R)! = input              %x: f32[8,16] (tp=R)! = input
    %w: f32[16,64] (tp=S1)! = input     ->     %w: f32[16,64] (tp=S1)! = input
    %h: f32[8,64] = matmul(%x, %w)             %h: f32[8,64] (tp=S1) = matmul(%x, %w)
    %y: f32[8,64] = gelu(%h)                   %y: f32[8,64] (tp=S1) = gelu(%h)

An inferred value may be Partial: what reads it says what it must become. A law by reference
(`Value.like`) becomes a layout as soon as the other value has one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mdfuse.errors import LayoutError
from mdfuse.ir.graph import Expr, Fusion, Value, leading_to
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, replicated
from mdfuse.mesh import DeviceMesh
from mdfuse.passes.readers import Readers
from mdfuse.passes.strategy import choose_here, is_view

name = "propagate_layouts"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with a layout on every tensor."""
    while True:
        fusion = _forwards(fusion)
        fusion, changed = _backwards(fusion)
        if changed:
            continue
        lost = [n for n, v in fusion.values.items() if v.is_tensor and v.layout is None]
        lost.sort(key=lambda n: fusion.values[n].like is not None)
        if not lost:
            break
        # Nothing around these values says where they live: the mesh of the first layout is taken.
        fusion = fusion.with_layouts({lost[0]: replicated(_default_mesh(fusion))})
    return _whole_outputs(fusion)


def anew(fusion: Fusion, changed: Collection[str]) -> Fusion:
    """Return the fusion with layouts inferred again for all dependents of changed values."""
    values, stale = dict(fusion.values), set(changed)
    for expr in fusion.exprs:
        for out in [values[name] for name in expr.outputs]:
            if not out.is_tensor or out.name in changed:
                continue
            if out.like is not None:
                is_stale = not stale.isdisjoint((out.like.of, out.like.past, *expr.reads))
            else:
                is_stale = not out.is_law and not stale.isdisjoint(expr.reads)
            if is_stale:
                stale.add(out.name)
                values[out.name] = out.having(layout=None, is_law=False)
    return run(replace(fusion, values=values))


def _default_mesh(fusion: Fusion) -> DeviceMesh:
    layouts = (v.layout for v in fusion.values.values())
    return next((x.mesh for x in layouts if x is not None), DeviceMesh([0]))


def _forwards(fusion: Fusion) -> Fusion:
    """Infer results from operands, in order."""
    values = dict(fusion.values)
    for name in fusion.inputs:
        if values[name].like is not None and values[name].layout is None:
            values[name] = _placed(values, values[name], None)
    live = {expr.outputs[0] for expr in leading_to(fusion.exprs, fusion.outputs)}
    for name, value in values.items():
        if value.copies:
            values[name] = value.having(copies=())
    readers = Readers(values)
    for expr in fusion.exprs:
        outputs = [values[name] for name in expr.outputs]
        strategy = None if _crosses(expr, values) else choose_here(expr, values)
        layouts = strategy.results if strategy is not None else (None,) * len(outputs)
        for out, layout in zip(outputs, layouts, strict=True):
            if out.layout is not None:
                continue
            if out.like is not None:
                values[out.name] = _placed(values, out, layout)
            elif layout is not None:
                layout = _of_output(fusion, values, out.name, layout)
                values[out.name] = out.having(layout=layout)
        if strategy is not None and expr.outputs[0] in live:
            if outputs[0].like is not None and outputs[0].layout is None:  # it is known by now
                strategy = choose_here(expr, values) or strategy
            readers.read(expr, strategy.wanted)
        if is_view(expr) and expr.op != "set":  # what a set copies is brought nowhere before it
            readers.add(expr)
    return replace(fusion, values=values)


def _crosses(expr: Expr, values: Mapping[str, Value]) -> bool:
    """Return whether a `set` goes to another mesh: it neither infers nor shares any layout."""
    if expr.op != "set":
        return False
    before, after = (values[x].layout for x in (*expr.reads, *expr.outputs))
    return before is not None and after is not None and before.mesh != after.mesh


def _placed(values: Mapping[str, Value], value: Value, inferred: Layout | None) -> Value:
    """Return a value with the layout that its law by reference is, where that is known by now."""
    assert value.like is not None
    layout = values[value.like.of].layout
    if layout is None:
        return value
    asked = {a: Replicate() if isinstance(p, Partial) else p for a, p in layout.by_axis().items()}
    law = Layout(layout.mesh, asked, layout.order)
    previous = values[value.like.past].layout if value.like.past is not None else None
    if (
        previous is None
        or previous.mesh != layout.mesh
        or inferred is None
        or inferred.mesh != law.mesh
    ):
        return value.having(layout=_along(law, value.like.but), is_law=True)
    for axis, before in layout.by_axis().items():
        if not isinstance(before, Replicate) and before != previous.placement(axis):
            inferred = inferred.with_placement(axis, asked[axis])
    return value.having(layout=_along(_ordered_as(inferred, law), value.like.but))


def _along(layout: Layout, stated: tuple[tuple[str, Placement], ...]) -> Layout:
    """Return a layout with the placements that the user stated along some axes."""
    for axis, placement in stated:
        if layout.mesh.axis_size(axis) > 1:
            layout = layout.with_placement(axis, placement)
    return layout


def _ordered_as(layout: Layout, law: Layout) -> Layout:
    """Return a layout in which axes split a dim in the order of another one, if they are its."""
    splits = {d: layout.split_axes(d) for d in {*layout.order, *law.order}}
    order = {d: law.split_axes(d) if {*law.split_axes(d)} == {*s} else s for d, s in splits.items()}
    return Layout(layout.mesh, layout.by_axis(), order)


def _of_output(fusion: Fusion, values: Mapping[str, Value], name: str, inferred: Layout) -> Layout:
    """Return the inferred layout; that of an output is not Partial, or its reused input's."""
    if name not in fusion.returned:
        return inferred
    if name in fusion.reuse:
        return values[fusion.reuse[name]].layout or inferred
    for axis in inferred.partial_axes:
        inferred = inferred.with_placement(axis, Replicate())
    return inferred


def _backwards(fusion: Fusion) -> tuple[Fusion, bool]:
    """Infer operands that have no layout yet from their readers, in reverse order."""
    values = dict(fusion.values)
    changed = False
    for expr in reversed(fusion.exprs):
        unknown = [n for n in expr.reads if _is_open(values[n])]
        if not unknown:
            continue
        strategy = choose_here(expr, values)
        if strategy is None:
            continue
        for operand in unknown:  # rows of other parts, as windows read, are in a copy of its own
            layout = strategy.wanted[operand].without_reaches
            values[operand] = values[operand].having(layout=layout)
            changed = True
    return replace(fusion, values=values), changed


def _is_open(value: Value) -> bool:
    """Return whether the readers of a value may choose its layout."""
    return value.is_tensor and value.layout is None and value.like is None


def _whole_outputs(fusion: Fusion) -> Fusion:
    """Give every output the layout of `_of_output`, also those not inferred from operands."""
    layouts = {}
    for output in fusion.outputs:
        value = fusion.values[output]
        if value.layout is not None and not value.is_law:
            layouts[output] = _of_output(fusion, fusion.values, output, value.layout)
        elif output in fusion.reuse:
            _check_reused(fusion, value, fusion.reuse[output])
    return fusion.with_layouts(layouts)


def _check_reused(fusion: Fusion, value: Value, buffer: str) -> None:
    """Raise LayoutError where a law on an output contradicts the input that it is written into."""
    layout, ndim = fusion.layout(buffer), len(value.shape)
    if value.placed.normalized(ndim) != layout.normalized(ndim):  # axes of one rank split nothing
        raise LayoutError(
            f"%{value.name} is laid out as {value.layout}, but it is written into "
            f"%{buffer}: {layout}",
            where=fusion.where(value.name, buffer),
            because="a rank's part of the result takes the place of its part of the input",
            hint=f"place both alike, or leave reuse={buffer} out",
        )
