"""Let attention read the heads of key and value that several heads of the query share.

    %a = unsqueeze(%k, dims=[2])                    %y = scaled_dot_product_attention(
    %b = expand(%a, shape=[1,2,4,64,32])                %q, %k, %v, None, enable_gqa=True)
    %c = reshape(%b, shape=[1,8,64,32])     ->
    %y = scaled_dot_product_attention(%q, %c, ...)

The definition repeats each head, so that a split of the query's heads finds its part of them
whatever the numbers are. Where each rank repeats just its own heads, the copies need not be made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mdfuse.config import Options
from mdfuse.hir.instructions import BLOCKS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.shapes import times_of_heads
from mdfuse.layouts.layout import Shard

name = "group_heads"

#: How a definition repeats heads, from the last step to the first.
_STEPS = ("reshape", "expand", "unsqueeze")


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with attention that repeats no heads."""
    if not any(i.fn == "scaled_dot_product_attention" for i in program.walk()):
        return program
    bound = Counter(n for i in program.walk() if i.op != "launch" for n in i.outputs)
    block = _block(program, program.instructions, bound)
    if block == program.instructions:
        return program
    return _without_unread(replace(program, instructions=block))


def _block(
    program: HostProgram, block: Sequence[Instruction], bound: Counter[str]
) -> tuple[Instruction, ...]:
    binders: dict[str, Instruction] = {}
    done: list[Instruction] = []
    for i in block:
        if i.fn == "scaled_dot_product_attention":
            i = _grouped(program, i, binders, bound)
        elif i.body or i.orelse:
            body, orelse = (_block(program, b, bound) for b in (i.body, i.orelse))
            i = replace(i, body=body, orelse=orelse)
        binders.update((n, i) for n in i.outputs)
        done.append(i)
    return tuple(done)


def _grouped(
    program: HostProgram, i: Instruction, binders: dict[str, Instruction], bound: Counter[str]
) -> Instruction:
    """Return an attention on the heads before they were repeated, if both were, and alike."""
    query, *repeated = i.inputs[:3]
    shared = [_before(program, x, binders, bound) for x in repeated]
    if None in shared or not isinstance(query, str):
        return i
    counts = {program.types[x].shape[-3] for x in shared if x is not None}
    if len(counts) > 1:
        return i
    attrs = (*i.attrs, ("enable_gqa", True))
    return replace(i, inputs=(query, *shared, *i.inputs[3:]), attrs=attrs)


def _before(
    program: HostProgram, x: object, binders: dict[str, Instruction], bound: Counter[str]
) -> str | None:
    """Return the value whose heads a value repeats, each rank its own; None if there is none."""
    names = [x]
    for step in _STEPS:
        i = binders.get(str(names[-1]))
        if i is None or i.fn != step or i.order is not None or bound[i.outputs[0]] != 1:
            return None
        names.append(i.reads[0])
    types = [program.types[str(n)] for n in names]
    last, first, source = types[0], types[-1], str(names[-1])
    times = times_of_heads(*(kind.shape for kind in types))
    if times == 0 or first.layout is None or first.layout != last.layout:
        return None
    shared, dim = first.shape[-3], len(first.shape) - 3
    sizes = zip(first.layout.mesh.shape, first.layout.placements, strict=True)
    parts = math.prod(size for size, placement in sizes if placement == Shard(dim))
    is_whole = shared % parts == 0 and _stays(program, source, bound)
    return source if is_whole else None


def _stays(program: HostProgram, name: str, bound: Counter[str]) -> bool:
    """Return whether nothing writes a value again."""
    if name in program.inputs:
        return name not in program.written_inputs and not bound[name]
    return bound[name] == 1 and program.root(name) == name


def _without_unread(program: HostProgram) -> HostProgram:
    """Leave out the views that nobody reads any more."""
    while True:
        needed = {
            *program.outputs,
            *(x for i in program.walk() if i.op != "launch" for x in i.reads),
        }
        block = _reading(program.instructions, needed)
        if block == program.instructions:
            return program
        bound = {n for i in block for j in i.walk() for n in j.outputs}
        gone = {n for i in program.walk() for n in i.outputs} - bound
        types = {n: kind for n, kind in program.types.items() if n not in gone}
        program = replace(program, instructions=block, types=types)


def _reading(block: Sequence[Instruction], needed: set[str]) -> tuple[Instruction, ...]:
    done = []
    for i in block:
        if i.fn in _STEPS and i.op != "launch" and needed.isdisjoint(i.outputs):
            continue
        if i.op == "launch":
            body = _reading(i.body, needed)
            bound = {n for j in body for n in j.outputs}
            i = replace(i, body=body, outputs=tuple(n for n in i.outputs if n in bound))
        elif i.op in BLOCKS:
            i = replace(i, body=_reading(i.body, needed), orelse=_reading(i.orelse, needed))
        done.append(i)
    return tuple(done)
