"""Let a value lie in the memory of the output that takes its place, where that is large.

    %a = linear(%z, %w0)                            %y = linear(%z, %w0)
    %h = add(%x, %a)                                %h = add(%x, %y)
    %n = rms_norm(%h, %w)                           %n = rms_norm(%h, %w)
    %u = linear(%n, %w1)                     ->     %u = linear(%n, %w1)
    %m = linear(%u, %w2)                            %m = linear(%u, %w2)
                                                    %h_again = add(%x, %y)
    %y = add(%h, %m)                                %y = add(%h_again, %m)

The memory of an output is there from the start where runs are captured as graphs, and no use until
it is written. Here it holds what an elementwise op makes the output of: a product, which is rounded
as it is made, where the rest is an input of the program; else %h itself. A compiler keeps %h in
registers, so that it is rounded only where it is written. What is written over is read before in
launches of their own (`group_launches`), so only where nothing is lost by that: what is made of the
value goes to library calls, which no compiler joins with what is before. And only where it saves
anything: the program holds most while the value is there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import accumulate

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import storage
from mdfuse.hir.instructions import BLOCKS, is_library, is_local, op_of
from mdfuse.hir.passes.group_launches import is_grouped
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import fresh_name

name = "fill_outputs"

#: Bytes of an output from which on this is done: one kernel may be made of fewer ops by it.
LEAST = 1 << 20


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with values in the memory of outputs, where launches are made."""
    if not is_grouped(options) or program.aliases or len(program.meshes) != 1:
        return program
    if any(i.op in (*BLOCKS, "set_stream", "launch") for i in program.instructions):
        return program
    for output in dict.fromkeys(program.outputs):
        program = _filled(program, output)
    return program


def _filled(program: HostProgram, output: str) -> HostProgram:
    """Return the program with a value in the memory of an output; itself where there is none."""
    code = program.instructions
    places = [n for n, i in enumerate(code) if output in i.outputs]
    if len(places) != 1 or not _is_elementwise(code[places[0]]):
        return program
    (at,) = places
    kind = program.types[output]
    if code[at].order not in (None, tuple(range(len(kind.shape)))):
        return program  # what reads the value would read it column by column
    if kind.layout is None or kind.nbytes() < LEAST:
        return program
    value = next((x for x in code[at].reads if _may_lie_there(program, x, output, at)), None)
    if value is None:
        return program
    made = next(n for n, i in enumerate(code) if value in i.outputs)
    if not made < _fullest(program) < at:
        return program
    product = _product(program, code[made], output)
    if product is None:
        return _moved(program, value, output, at)
    again = fresh_name(program.types, f"{value}_again")
    inputs = tuple(again if x == value else x for x in code[at].inputs)
    new = [*code[:at], code[made].changed(outputs=(again,)), code[at].changed(inputs=inputs)]
    types = {**program.types, again: kind}
    program = replace(program, instructions=(*new, *code[at + 1 :]), types=types)
    return _moved(program, product, output, at + 1)


def _moved(program: HostProgram, value: str, output: str, at: int) -> HostProgram:
    """Return the program with a value in the memory of the output that is made at a place."""
    new = list(program.instructions)
    made = next(n for n, i in enumerate(new) if value in i.outputs)
    new[made] = new[made].changed(outputs=(output,), order=new[at].order)
    new[at] = new[at].changed(order=None)
    for n in range(made + 1, at + 1):
        inputs = tuple(output if x == value else x for x in new[n].inputs)
        new[n] = new[n].changed(inputs=inputs)
    types = {n: kind for n, kind in program.types.items() if n != value}
    return replace(program, instructions=tuple(new), types=types)


def _product(program: HostProgram, maker: Instruction, output: str) -> str | None:
    """Return the product that a value is made of, if the rest are inputs of the program."""
    code, types = program.instructions, program.types
    (x, *more) = {*maker.reads} - {*program.inputs} or ("", "")
    if more or types.get(x) != types[output] or _family(program, x) != [x]:
        return None
    makers = [i for i in code if x in i.outputs]
    is_product = all(is_library(i) and len(i.outputs) == 1 and i.order is None for i in makers)
    readers = sum(x in i.reads for i in code)
    return x if is_product and len(makers) == readers == 1 else None


def _family(program: HostProgram, value: str) -> list[str]:
    """Return the names in the memory of a value."""
    return [n for n, of in storage(program).items() if of == value]


def _is_elementwise(i: Instruction) -> bool:
    op = op_of(i)
    return op is not None and i.op == op.host and op.is_elementwise and len(i.outputs) == 1


def _may_lie_there(program: HostProgram, value: str, output: str, at: int) -> bool:
    """Return whether a value may lie in the memory of what an instruction makes of it.

    Args:
        program: straight-line, without aliases.
        value: what the instruction reads.
        output: what it makes.
        at: its place.
    """
    code, types = program.instructions, program.types
    if value in (*program.inputs, *program.outputs) or types.get(value) != types[output]:
        return False
    if _family(program, value) != [value]:
        return False  # it is a part of another value, or others are parts of it
    makers = [i for i in code if value in i.outputs]
    readers = [(n, i) for n, i in enumerate(code) if value in i.reads]
    if len(makers) != 1 or not _is_elementwise(makers[0]) or makers[0].order is not None:
        return False
    if readers[-1][0] != at or not all(is_local(i) for _, i in readers):
        return False
    read = defaultdict[str, list[Instruction]](list)
    for i in code:
        for x in i.reads:
            read[x].append(i)
    return all(_leads_to_libraries(i, read) for _, i in readers[:-1])


def _leads_to_libraries(i: Instruction, readers: dict[str, list[Instruction]]) -> bool:
    return is_library(i) or all(is_library(j) for x in i.outputs for j in readers[x])


def _fullest(program: HostProgram) -> int:
    """Return the place of the instruction at which the program holds most, the first of several."""
    code, shared = program.instructions, storage(program)
    first, last = dict[str, int](), dict[str, int]()
    for n, i in enumerate(code):
        for x in (*i.outputs, *i.reads):
            of = shared.get(x, x)
            first.setdefault(of, n)
            last[of] = n
    held = Counter[int]()
    for x in first.keys() - {*program.inputs, *program.outputs}:
        kind = program.types.get(x)
        if kind is not None and kind.layout is not None:
            size = kind.nbytes()
            held[first[x]] += size
            held[last[x] + 1] -= size
    heights = list(accumulate(held[n] for n in range(len(code))))
    return heights.index(max(heights))
