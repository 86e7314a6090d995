"""Let waits stand where the data is needed, behind all independent work.

    %c0 = post allgather(%a) -> %b                  %c0 = post allgather(%a) -> %b
    wait %c0                                        %d = matmul(%x, %w)
    %v = permute(%b, dims=[1,0])            ->      wait %c0
    %d = matmul(%x, %w)                             %v = permute(%b, dims=[1,0])
    %e = add(%v, %d)                                %e = add(%v, %d)

Views of what arrives go with the wait. Posts keep their order, which is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.ops import TABLE

name = "sink_waits"

#: Views on buffers that are no rows of the op table.
_VIEWS = ("narrow", "select")


@dataclass(eq=False)
class _Deferred:
    """A wait that was put off, with the views of what it waits for."""

    instructions: list[Instruction]
    names: set[str] = field(default_factory=set)


def run(program: HostProgram) -> HostProgram:
    """Return the program with its waits moved down."""
    done: list[Instruction] = []
    waiting: list[_Deferred] = []
    arrives: dict[str, str] = {}  # handle -> the buffer that its post writes
    for i in program.instructions:
        if i.op == "post":
            destination = i.inputs[1]
            assert isinstance(destination, str)
            arrives[i.outputs[0]] = destination
        needed = [d for d in waiting if d.names.intersection(i.reads)]
        if i.op == "wait":
            waiting.append(_Deferred([i], {arrives[i.reads[0]]}))
        elif len(needed) == 1 and _is_view(i):
            needed[0].instructions.append(i)
            needed[0].names.update(i.outputs)
        else:
            for d in waiting if i.op == "return" else needed:
                done += d.instructions
            waiting = [] if i.op == "return" else [d for d in waiting if d not in needed]
            done.append(i)
    assert not waiting, "a program ends with its return"
    return replace(program, instructions=tuple(done))


def _is_view(i: Instruction) -> bool:
    """It reads no element, so it may stand before or after others as it likes."""
    if i.order is not None:
        return False
    if i.fn in TABLE:
        return TABLE[i.fn].is_view and i.fn not in ("reshape", "stride_order")
    return i.op in _VIEWS
