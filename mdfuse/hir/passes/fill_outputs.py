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
launches of their own (`form_fusion_groups`), so only where nothing is lost: what is made of the
value goes to library calls, which no compiler joins with what is before. And only where it saves
anything: the program holds most while the value is there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, dataflow
from mdfuse.hir.instructions import BLOCKS, is_elementwise, is_library, is_local
from mdfuse.hir.passes.form_fusion_groups import is_grouped
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
    code, flow = program.instructions, dataflow(program)
    places = flow.results(output)
    if len(places) != 1 or not _is_one(code[places[0]]):
        return program
    (at,) = places
    kind = program.types[output]
    if code[at].order not in (None, tuple(range(len(kind.shape)))):
        return program  # what reads the value would read it column by column
    if kind.layout is None or kind.nbytes() < LEAST:
        return program
    value = next((x for x in code[at].reads if _may_lie_there(flow, output, x, at)), None)
    if value is None or not flow.results(value)[0] < _fullest(program) < at:
        return program
    first = flow.results(value)[0]
    product = _product(program, output, first)
    if product is None:
        return _moved(program, value, output, at)
    again = fresh_name(program.types, f"{value}_again")
    inputs = tuple(again if x == value else x for x in code[at].inputs)
    new = [*code[:at], code[first].changed(outputs=(again,)), code[at].changed(inputs=inputs)]
    types = {**program.types, again: kind}
    program = replace(program, instructions=(*new, *code[at + 1 :]), types=types)
    return _moved(program, product, output, at + 1)


def _moved(program: HostProgram, value: str, output: str, at: int) -> HostProgram:
    """Return the program with a value in the memory of the output that is made at a place."""
    new = list(program.instructions)
    first = next(n for n, i in enumerate(new) if value in i.outputs)
    new[first] = new[first].changed(outputs=(output,), order=new[at].order)
    new[at] = new[at].changed(order=None)
    for n in range(first + 1, at + 1):
        inputs = tuple(output if x == value else x for x in new[n].inputs)
        new[n] = new[n].changed(inputs=inputs)
    types = {n: kind for n, kind in program.types.items() if n != value}
    return replace(program, instructions=tuple(new), types=types)


def _product(program: HostProgram, output: str, at: int) -> str | None:
    """Return the product that a value is made of at a place, if the rest are given inputs."""
    flow = dataflow(program)
    others = {*flow.code[at].reads} - {*program.inputs}
    if len(others) != 1:
        return None
    (x,) = others
    if not _is_free(flow, output, x, at) or flow.readers(x) != [at]:
        return None
    makers = [flow.code[n] for n in flow.results(x)]
    is_product = all(is_library(i) and len(i.outputs) == 1 and i.order is None for i in makers)
    return x if is_product and len(makers) == 1 else None


def _is_one(i: Instruction) -> bool:
    return is_elementwise(i) and len(i.outputs) == 1


def _is_free(flow: Dataflow, output: str, value: str, at: int) -> bool:
    """Return whether a value may lie in an output's memory, by no other name, up to a place."""
    return flow.may_lie_over(output, value, at) and flow.sharing[value] == [value]


def _may_lie_there(flow: Dataflow, output: str, value: str, at: int) -> bool:
    """Return whether a value may lie in the memory of what an instruction makes of it.

    Args:
        flow: of a straight program without aliases.
        output: what the instruction makes.
        value: what it reads.
        at: its place.
    """
    if not _is_free(flow, output, value, at):
        return False
    makers, readers = flow.results(value), flow.readers(value)
    if len(makers) != 1 or not _is_one(flow.code[makers[0]]):
        return False
    if flow.code[makers[0]].order is not None or not all(is_local(flow.code[n]) for n in readers):
        return False
    return all(_leads_to_libraries(flow, flow.code[n]) for n in readers[:-1])


def _leads_to_libraries(flow: Dataflow, i: Instruction) -> bool:
    readers = (flow.code[n] for x in i.outputs for n in flow.readers(x))
    return is_library(i) or all(map(is_library, readers))


def _fullest(program: HostProgram) -> int:
    """Return the place of the instruction at which the program holds most, the first of several."""
    held = Counter[int]()
    for x, touches in dataflow(program).touches.items():
        kind = program.types.get(x)
        is_given = x in program.inputs or x in program.outputs
        if not is_given and kind is not None and kind.layout is not None:
            size = kind.nbytes()
            held[touches[0][0]] += size
            held[touches[-1][0] + 1] -= size
    heights = list(accumulate(held[n] for n in range(len(program))))
    return heights.index(max(heights))
