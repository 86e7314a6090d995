"""Emit the host program of a fusion: local operations, sets, and loops over chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from mdfuse.hir.emit import reuse_inputs
from mdfuse.hir.emit.loops import emit_loop, loops
from mdfuse.hir.emit.ragged_values import emit_counted, emit_fetches, is_counted_expr
from mdfuse.hir.emit.sets import Emitter, Orders, copy_into, emit_set, local, value_type
from mdfuse.hir.emit.stage_blocks import Pipeline, emit_blocks, split_sections
from mdfuse.hir.orders import seen_through
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import Fusion, Value
from mdfuse.passes.segmentation import Section
from mdfuse.reshard import Carriers


def emit(
    fusion: Fusion,
    segments: tuple[Section, ...],
    stated: Orders | None = None,
    pipeline: Pipeline | None = None,
    carriers: Carriers = (),
    counts: Literal["host", "device"] = "host",
) -> HostProgram:
    """Return the global host program of a fusion whose only changes of layout are sets.

    Args:
        fusion: after all passes.
        segments: its sections.
        stated: name -> the memory order that its instruction states, whatever the value requires;
            None: no order.
        pipeline: the parts that run once per microbatch, and their calls.
        carriers: (axis, backend) of axes with a backend of their own.
        counts: where ranks know how many rows go to experts; see `mdfuse.Options`.
    """
    out = Emitter(fusion, stated=stated or {}, carriers=carriers, counts=counts)
    for name in fusion.inputs:
        out.types[name] = value_type(fusion.values[name])
    if pipeline is None:
        _emit_sections(out, segments)
    else:
        before, inside, behind = split_sections(pipeline, segments)
        _emit_sections(out, before)
        emit_blocks(out, pipeline, inside)
        _emit_sections(out, behind)
    out.code[:] = [j for i in out.code for j in _ordered(out, i)]
    out.code += out.last
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
    values, exprs = out.fusion.values, section.exprs
    first = exprs[0]
    if values[first.outputs[0]].is_tensor and is_counted_expr(out, first):
        emit_counted(out, first, value_type(values[first.output]))
        return
    if first.op == "set" and values[first.outputs[0]].is_tensor:
        emit_set(out, first)
        return
    body = tuple([local(e) for e in exprs])
    for name in [name for expr in exprs for name in expr.outputs]:
        out.types[name] = value_type(values[name])
    if len(body) == 1:
        out.code.append(body[0])
    else:
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
    emit_fetches(out, {name: name for name in section.outputs})


def _ordered(out: Emitter, i: Instruction) -> list[Instruction]:
    """Return an instruction with the required memory orders of its results.

    The last local op of each output writes it dense, in the order of the output's value, and so
    does that of every value whose order the user requires. A value that a communication delivered
    keeps its order, unless the user requires another one.
    An instruction with several results has no order: sets behind it copy those that need one.
    """
    if i.op == "launch":
        return [replace(i, body=tuple(k for j in i.body for k in _ordered(out, j)))]
    orders = _required_orders(out, i)
    if len(i.outputs) == 1:
        return [replace(i, order=order) for order in orders.values()] or [i]
    names = {name: name for name in i.outputs}
    sets = []
    for name, order in orders.items():
        if order is not None:
            names[name] = out.new(f"{name}.made", out.types[name])
            sets.append(copy_into(names[name], name, i.source, order))
    return [replace(i, outputs=tuple(names.values())), *sets] if sets else [i]


def _required_orders(out: Emitter, i: Instruction) -> dict[str, tuple[int, ...] | None]:
    """Return result -> the memory order that it must have, or None: the order that torch chooses.

    A result that may keep the order of the instruction is left out.
    """
    orders: dict[str, tuple[int, ...] | None] = {}
    for name in i.outputs if i.op != "alloc" else ():
        value = out.fusion.values.get(name)
        if value is None or not value.is_tensor:
            continue
        if name in out.stated:
            orders[name] = out.stated[name]
        elif _needs_order(out, i, name, value):
            orders[name] = value.order
    return orders


def _needs_order(out: Emitter, i: Instruction, name: str, value: Value) -> bool:
    if name in out.arrived:
        delivered = seen_through(i, tuple(range(len(value.order))))
        return value.is_order_required and delivered != value.order
    return value.is_order_required or name in out.fusion.outputs
