"""From segments to the host program: local operations, sets, and loops over stream chunks."""

from __future__ import annotations

from dataclasses import replace

from mdfuse.hir import reuse_inputs
from mdfuse.hir.emit_loops import emit_loop, loops
from mdfuse.hir.emit_sets import Emitter, emit_set, local, value_type
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import Fusion
from mdfuse.segmentation import Part


def emit(fusion: Fusion, segments: tuple[Part, ...]) -> HostProgram:
    """The global host program of a fusion whose only changes of layout are sets."""
    out = Emitter(fusion)
    for name in fusion.inputs:
        out.types[name] = value_type(fusion.values[name])
    for parts in loops(fusion, segments):
        if parts[0].is_streamed:
            emit_loop(out, parts)
        else:
            _emit_segment(out, parts[0])
    _require_output_orders(out)
    out.code.append(Instruction(op="return", inputs=fusion.outputs))
    program = HostProgram(
        name=fusion.name,
        types=out.types,
        inputs=fusion.inputs,
        outputs=fusion.outputs,
        instructions=tuple(out.code),
    )
    return reuse_inputs.run(program, fusion.reuse)


def _emit_segment(out: Emitter, part: Part) -> None:
    values = out.fusion.values
    first = part.exprs[0]
    if first.op == "set" and values[first.output].is_tensor:
        emit_set(out, first)
        return
    body = tuple(local(e) for e in part.exprs)
    for expr in part.exprs:
        out.types[expr.output] = value_type(values[expr.output])
    if len(body) == 1:
        out.code.append(body[0])
        return
    out.code.append(
        Instruction(
            op="launch",
            fn=part.name,
            inputs=part.inputs,
            outputs=part.outputs,
            body=body,
            source=first.source,
        )
    )


def _require_output_orders(out: Emitter) -> None:
    """The last local op of each output writes it dense, in the order it has on one device.

    What a communication delivered stays as it is.
    """
    for name in out.fusion.outputs:
        if name in out.fusion.inputs or not out.fusion.values[name].is_tensor:
            continue
        order = out.fusion.values[name].order
        for at, instruction in enumerate(out.code):
            if name not in instruction.outputs or instruction.op == "alloc":
                continue
            if instruction.op == "launch":
                body = tuple(
                    replace(i, order=order) if name in i.outputs else i for i in instruction.body
                )
                out.code[at] = replace(instruction, body=body)
            elif not _follows_post(out, at):
                out.code[at] = replace(instruction, order=order)


def _follows_post(out: Emitter, at: int) -> bool:
    """The instruction only reads back what a communication delivered (a permute or slice of it)."""
    instruction = out.code[at]
    if instruction.op not in ("permute", "narrow"):
        return False
    read = instruction.reads[0]
    return read.endswith((".recv", ".rows"))
