"""Emit the host program of a fusion's segments: local operations, sets, and loops over chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mdfuse.hir.emit import reuse_inputs
from mdfuse.hir.emit.blocks import Pipeline, emit_blocks, split_sections
from mdfuse.hir.emit.loops import emit_loop, loops
from mdfuse.hir.emit.sets import Emitter, Orders, emit_set, local, value_type
from mdfuse.hir.orders import seen_through
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import Fusion
from mdfuse.passes.segmentation import Section
from mdfuse.reshard import Carriers


def emit(
    fusion: Fusion,
    segments: tuple[Section, ...],
    stated: Orders | None = None,
    pipeline: Pipeline | None = None,
    carriers: Carriers = (),
) -> HostProgram:
    """Return the global host program of a fusion whose only changes of layout are sets.

    Args:
        fusion: after all passes.
        segments: its sections.
        stated: name -> the memory order that the instruction which computes it is to state (None:
            none), whatever else would be asked of it.
        pipeline: what runs once per microbatch, and when.
        carriers: (axis, backend) of those that have one of their own.
    """
    out = Emitter(fusion, stated=stated or {}, carriers=carriers)
    for name in fusion.inputs:
        out.types[name] = value_type(fusion.values[name])
    if pipeline is None:
        _emit_sections(out, segments)
    else:
        before, inside, behind = split_sections(pipeline, segments)
        _emit_sections(out, before)
        emit_blocks(out, pipeline, inside)
        _emit_sections(out, behind)
    _require_output_orders(out)
    out.code.append(Instruction(op="return", inputs=fusion.outputs))
    program = HostProgram(
        name=fusion.name,
        types=out.types,
        inputs=fusion.inputs,
        outputs=fusion.outputs,
        instructions=tuple(out.code),
    )
    required = {n: fusion.values[n] for n in fusion.reuse if fusion.values[n].is_order_required}
    return reuse_inputs.run(program, fusion.reuse, {n: v.order for n, v in required.items()})


def _emit_sections(out: Emitter, segments: Sequence[Section]) -> None:
    for sections in loops(out.fusion, segments):
        if sections[0].is_streamed:
            emit_loop(out, sections)
        else:
            _emit_segment(out, sections[0])


def _emit_segment(out: Emitter, section: Section) -> None:
    values = out.fusion.values
    first = section.exprs[0]
    if first.op == "set" and values[first.outputs[0]].is_tensor:
        emit_set(out, first)
        return
    body = tuple(local(e) for e in section.exprs)
    for expr in section.exprs:
        out.types.update((name, value_type(values[name])) for name in expr.outputs)
    if len(body) == 1:
        out.code.append(body[0])
        return
    out.code.append(
        Instruction(
            op="launch",
            fn=section.name,
            inputs=section.inputs,
            outputs=section.outputs,
            body=body,
            source=first.source,
        )
    )


def _require_output_orders(out: Emitter) -> None:
    """Make the last local op of each output write it dense, in the order of the output's value.

    The same goes for every value whose order the user requires. What a communication delivered
    stays as it is, unless the user requires another order.
    """
    out.code[:] = [j for i in out.code for j in _ordered(out, i)]


def _ordered(out: Emitter, i: Instruction) -> list[Instruction]:
    """Return the instruction with the memory orders that are required of what it writes.

    One with several results leaves them as they come; sets behind it order those that need it.
    """
    if i.op == "launch":
        return [replace(i, body=tuple(k for j in i.body for k in _ordered(out, j)))]
    if len(i.outputs) != 1 or i.op == "alloc":
        return _each_ordered(out, i)
    order = _required_order(out, i, i.outputs[0])
    return [i if order is _ANY else replace(i, order=order)]


def _each_ordered(out: Emitter, i: Instruction) -> list[Instruction]:
    made, sets = [*i.outputs], []
    for at, name in enumerate(i.outputs if i.op != "alloc" else ()):
        order = _required_order(out, i, name)
        if order is _ANY or order is None:
            continue
        made[at] = out.new(f"{name}.made", out.types[name])
        moved = Instruction(op="set", fn="set", inputs=(made[at],), outputs=(name,), order=order)
        sets.append(replace(moved, source=i.source))
    return [replace(i, outputs=tuple(made)), *sets] if sets else [i]


#: No memory order is required: that of the instruction stays.
_ANY: Any = object()


def _required_order(out: Emitter, i: Instruction, name: str) -> tuple[int, ...] | None:
    """Return the memory order that a result must have; None: the one it comes in; or `_ANY`."""
    value = out.fusion.values.get(name)
    if value is None or not value.is_tensor:
        return _ANY  # type: ignore[no-any-return]
    if name in out.stated:
        return out.stated[name]
    if name not in out.fusion.outputs and not value.is_order_required:
        return _ANY  # type: ignore[no-any-return]
    if name in out.arrived:
        lies = seen_through(i, tuple(range(len(value.order))))
        if not value.is_order_required or lies == value.order:
            return _ANY  # type: ignore[no-any-return]
    return value.order
