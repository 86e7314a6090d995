"""Place what is sent by the backend symmetric in memory out of which the others copy it.

With `Options(backend="symmetric")`:

                                                  %h: … = alloc(memory=symmetric)
    %h: … = relu(%x)                       ->     %h: … = relu(%x)
    %c = post allgather(%h) -> %y …               %c = post allgather(%h) -> %y …

So the post need not copy it into an outbox. Only what the program itself computes, or allocates,
and does not return: other buffers are the caller's. Where an op of torch cannot compute into a
buffer, its result is copied there, which takes as long as a copy into an outbox; on CPUs a piece
that fits into the slots then is copied once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mdfuse.config import Options, backend_choice
from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.instructions import POSTS, counts_of
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.ops import TABLE

name = "place_symmetric"

#: The backend whose ranks see each other's memory.
SYMMETRIC = "symmetric"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program whose sent buffers lie in symmetric memory, where a post sends them so."""
    choice = backend_choice(options.backend)
    if SYMMETRIC not in choice.names:
        return program
    sent = set(map(dataflow(program).memory, _sent(program, choice.usual)))
    allocs = Counter(x for i in program.walk() if i.op == "alloc" for x in i.outputs)
    pinned = {program.root(x) for x in (*program.inputs, *program.outputs, *program.aliases)}
    placed = {x for x in sent - pinned - {*program.outputs} if allocs[x] <= 1}
    return replace(program, instructions=_block(program.instructions, placed, {*allocs}))


def _sent(program: HostProgram, usual: str) -> Iterator[str]:
    """Yield the names of what goes through memory that the ranks share."""
    for i in program.walk():
        if i.op in POSTS and i.op != "recv" and isinstance(i.inputs[0], str) and not counts_of(i):
            named = i.comm.backend if i.comm is not None else i.kwargs.get("backend")
            if (named or usual) == SYMMETRIC:
                yield i.inputs[0]


def _block(
    block: tuple[Instruction, ...], placed: set[str], allocated: set[str]
) -> tuple[Instruction, ...]:
    code: list[Instruction] = []
    for i in block:
        if i.op == "alloc" and placed.issuperset(i.outputs) and "memory" not in i.kwargs:
            i = replace(i, attrs=(("memory", SYMMETRIC), *i.attrs))
        for x in i.outputs:
            if x in placed and x not in allocated and _writes(i, x):
                allocated.add(x)
                code.append(_alloc(i, x))
        body, orelse = (_block(inner, placed, allocated) for inner in (i.body, i.orelse))
        is_block = i.op != "launch" and (i.body or i.orelse)
        code.append(replace(i, body=body, orelse=orelse) if is_block else i)
    return tuple(code)


def _alloc(i: Instruction, output: str) -> Instruction:
    """Return what makes the buffer of a result, in the order that is asked for."""
    orders = [inner.order for inner in (i, *i.body) if output in inner.outputs and inner.order]
    memory = (("memory", SYMMETRIC),)
    order = orders[0] if orders else None
    return Instruction(op="alloc", outputs=(output,), attrs=memory, order=order, source=i.source)


def _writes(i: Instruction, output: str) -> bool:
    """Return whether an instruction can write its result into a buffer: it computes it anew."""
    if i.op == "launch":
        return any(_writes(inner, output) for inner in i.body if output in inner.outputs)
    if i.op == "pack":
        return True
    row = TABLE.get(i.fn)
    return row is not None and not row.is_view and row.results == 1
