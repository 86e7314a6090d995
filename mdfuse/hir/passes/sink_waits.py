"""Move waits down to where the data is needed, behind all independent work.

    %c0 = post allgather(%a) -> %b                  %c0 = post allgather(%a) -> %b
    wait %c0                                        %d = matmul(%x, %w)
    %v = permute(%b, dims=[1,0])            ->      wait %c0
    %d = matmul(%x, %w)                             %v = permute(%b, dims=[1,0])
    %e = add(%v, %d)                                %e = add(%v, %d)

Views of what arrives, rows that go to the order of their experts, and pointwise work on it go with
the wait: a gradient that is cast once it is reduced is not waited for before somebody reads it.
Posts keep their order, which is the same on all ranks. A wait stays in its block: an iteration of a
loop ends with all its posts done. It stands before what writes where the post reads, as an output
does that is written into an input. It stands before a group of posts, never among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, Effects, dataflow, grouped
from mdfuse.hir.instructions import op_of, reads_nothing, received, row_of
from mdfuse.hir.program import HostProgram, Instruction

name = "sink_waits"


@dataclass(frozen=True, eq=False)
class _Deferred:
    """A wait that is put off, with the work on what it waits for.

    Attributes:
        instructions: the wait, views and pointwise work; several waits where that reads of several.
        effects: the memory that must not be written before it, and the names, not all of their
            memory, that must not be used.
    """

    instructions: tuple[Instruction, ...]
    effects: Effects


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with its waits moved down."""
    return replace(program, instructions=_sunk(dataflow(program), program.instructions))


def _sunk(flow: Dataflow, block: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return a block with its waits moved down."""
    done: list[Instruction] = []
    waiting: list[_Deferred] = []
    busy = Effects()  # of all that wait, looked at first
    for members in grouped(block):
        i, needed = members[0], list[_Deferred]()
        effects = Effects.union([flow.effects(j) for j in members]) if waiting else busy
        if waiting and busy.meet(effects):
            needed = [d for d in waiting if d.effects.meet(effects)]
        if i.op == "wait":
            waiting.append(_deferred(flow, i))
            busy = busy | waiting[-1].effects
            continue
        if needed and _may_wait(i) and all(flow.is_bound_by(x, i) for x in i.outputs):
            at = waiting.index(needed[0])
            waiting[at] = _joined([*needed, _deferred(flow, i)])
            waiting = [d for d in waiting if d not in needed]
        else:
            for d in sorted(waiting, key=_is_idle) if i.op == "return" else needed:
                done += d.instructions
            waiting = [] if i.op == "return" else [d for d in waiting if d not in needed]
            if i.op in ("for", "block"):
                members = [replace(i, body=_sunk(flow, i.body))]
            done += members
        if needed:
            busy = Effects.union([d.effects for d in waiting])
    return (*done, *(i for d in waiting for i in d.instructions))


def _deferred(flow: Dataflow, i: Instruction) -> _Deferred:
    """Return a wait, or work on what arrives, as it is put off."""
    used = flow.posts[i.reads[0]] if i.op == "wait" else i
    names = i.outputs if i.op != "wait" else received(used) if used.op == "post" else used.reads
    reads = frozenset(map(flow.memory, used.reads))
    return _Deferred((i,), Effects(reads, frozenset(names)))


def _joined(deferred: Sequence[_Deferred]) -> _Deferred:
    """Return several that are put off as one."""
    instructions = tuple([i for d in deferred for i in d.instructions])
    return _Deferred(instructions, Effects.union([d.effects for d in deferred]))


def _is_idle(deferred: _Deferred) -> bool:
    """Return whether nothing is computed behind a wait: of those, others may come first."""
    return all(i.op == "wait" or reads_nothing(i) for i in deferred.instructions)


def _may_wait(i: Instruction) -> bool:
    """Return whether an instruction goes with a wait: a view, or work that costs little."""
    row, op = row_of(i), op_of(i)
    is_elementwise = row is not None and op is not None and op.is_elementwise
    return reads_nothing(i) or is_elementwise or i.fn == "rows_to_experts"
