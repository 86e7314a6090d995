"""Give every value a layout: the user's are laws, the rest is inferred forwards, then backwards.

    %x: f32[8,16] (tp=R)! = input              %x: f32[8,16] (tp=R)! = input
    %w: f32[16,64] (tp=S1)! = input     ->     %w: f32[16,64] (tp=S1)! = input
    %h: f32[8,64] = matmul(%x, %w)             %h: f32[8,64] (tp=S1) = matmul(%x, %w)
    %y: f32[8,64] = gelu(%h)                   %y: f32[8,64] (tp=S1) = gelu(%h)

An inferred value may be Partial: what reads it says what it must become.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mdfuse.errors import LayoutError
from mdfuse.ir.graph import Fusion, Value
from mdfuse.layouts.layout import Layout, Replicate, replicated
from mdfuse.mesh import DeviceMesh
from mdfuse.passes.strategy import choose_here

name = "propagate_layouts"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with a layout on every tensor."""
    while True:
        fusion = _forwards(fusion)
        fusion, changed = _backwards(fusion)
        if changed:
            continue
        lost = [n for n, v in fusion.values.items() if v.is_tensor and v.layout is None]
        if not lost:
            break
        # Nothing around these values says where they live: the mesh of the first layout is taken.
        fusion = fusion.with_layouts({lost[0]: replicated(_default_mesh(fusion))})
    return _whole_outputs(fusion)


def anew(fusion: Fusion, changed: Collection[str]) -> Fusion:
    """Return the fusion with layouts inferred again for all that changed values lead to."""
    values, stale = dict(fusion.values), set(changed)
    for expr in fusion.exprs:
        for out in [values[name] for name in expr.outputs]:
            is_inferred = out.is_tensor and not out.is_law and out.name not in changed
            if is_inferred and not stale.isdisjoint(expr.reads):
                stale.add(out.name)
                values[out.name] = replace(out, layout=None)
    return run(replace(fusion, values=values))


def _default_mesh(fusion: Fusion) -> DeviceMesh:
    layouts = (v.layout for v in fusion.values.values())
    return next((x.mesh for x in layouts if x is not None), DeviceMesh([0]))


def _forwards(fusion: Fusion) -> Fusion:
    """Infer results from operands, in order."""
    values = dict(fusion.values)
    for expr in fusion.exprs:
        made = [values[name] for name in expr.outputs]
        if not any(out.is_tensor and out.layout is None for out in made):
            continue
        strategy = choose_here(expr, values)
        for out, layout in zip(made, strategy.results if strategy else (), strict=False):
            if out.layout is None:
                layout = _of_output(fusion, values, out.name, layout)
                values[out.name] = replace(out, layout=layout)
    return replace(fusion, values=values)


def _of_output(fusion: Fusion, values: Mapping[str, Value], name: str, inferred: Layout) -> Layout:
    """Return the inferred layout; that of an output is not Partial, or its reused input's."""
    if name not in fusion.outputs:
        return inferred
    if name in fusion.reuse:
        return values[fusion.reuse[name]].layout or inferred
    for axis in inferred.partial_axes:
        inferred = inferred.with_placement(axis, Replicate())
    return inferred


def _backwards(fusion: Fusion) -> tuple[Fusion, bool]:
    """Infer operands that have no layout yet from what reads them, in reverse order."""
    values = dict(fusion.values)
    changed = False
    for expr in reversed(fusion.exprs):
        unknown = [n for n in expr.reads if values[n].is_tensor and values[n].layout is None]
        if not unknown:
            continue
        strategy = choose_here(expr, values)
        if strategy is None:
            continue
        for operand in unknown:
            values[operand] = replace(values[operand], layout=strategy.wanted[operand])
            changed = True
    return replace(fusion, values=values), changed


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
    layout = fusion.layout(buffer)
    if value.layout != layout:
        raise LayoutError(
            f"%{value.name} is laid out as {value.layout}, but it is written into "
            f"%{buffer}: {layout}",
            where=fusion.where(value.name, buffer),
            because="a rank's part of the result takes the place of its part of the input",
            hint=f"place both alike, or leave reuse={buffer} out",
        )
