"""Move waits down to where the data is needed, behind all independent work.

    %c0 = post allgather(%a) -> %b                  %c0 = post allgather(%a) -> %b
    wait %c0                                        %d = matmul(%x, %w)
    %v = permute(%b, dims=[1,0])            ->      wait %c0
    %d = matmul(%x, %w)                             %v = permute(%b, dims=[1,0])
    %e = add(%v, %d)                                %e = add(%v, %d)

Views of what arrives, and pointwise work on it, go with the wait: a gradient that is cast once it
is reduced is not waited for before somebody reads it. Posts keep their order, which is the same on
all ranks. A wait stays in its block: an iteration of a loop ends with all its posts done. It stands
before what writes where the post reads, as an output does that is written into an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import storage
from mdfuse.hir.instructions import POSTS, op_of, row_of
from mdfuse.hir.program import HostProgram, Instruction

name = "sink_waits"


@dataclass(eq=False)
class _Deferred:
    """A wait that is put off, with the work on what it waits for.

    Attributes:
        instructions: the wait, views and pointwise work; several waits where that reads of several.
        names: what must not be used before it.
        sources: the memory that must not be written before it.
    """

    instructions: list[Instruction]
    names: set[str] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with its waits moved down."""
    sinking = _Sinking(program, storage(program))
    for i in program.walk():
        if i.op in POSTS:
            sinking.note(i)
    block = sinking.block(program.instructions, set(program.inputs))
    return replace(program, instructions=block)


@dataclass
class _Sinking:
    """What moving the waits of a program's blocks must know.

    Attributes:
        program: that the blocks are part of.
        shared: name -> the name whose memory it may share.
        posted: handle -> the buffers that its post uses.
        reads: handle -> the memory that its post reads.
    """

    program: HostProgram
    shared: Mapping[str, str]
    posted: dict[str, set[str]] = field(default_factory=dict)
    reads: dict[str, set[str]] = field(default_factory=dict)

    def note(self, i: Instruction) -> None:
        """Note a post, for which a wait may stand in another block."""
        self.posted[i.outputs[0]] = set(i.reads if i.op != "post" else i.reads[-1:])
        self.reads[i.outputs[0]] = {self.shared[x] for x in i.reads if x in self.shared}

    def block(self, block: tuple[Instruction, ...], before: set[str]) -> tuple[Instruction, ...]:
        """Return a block with its waits moved down.

        Args:
            block: the instructions.
            before: the buffers that there are before the block.
        """
        shared, root = self.shared, self.program.root
        done: list[Instruction] = []
        waiting: list[_Deferred] = []
        bound = set(before)
        for i in block:
            touched = {x for j in i.walk() for x in (*j.reads, *j.outputs)}
            outputs = {x for j in i.walk() for x in j.outputs}
            written = {shared[x] for x in outputs if x in shared and root(x) in bound}
            needed = [d for d in waiting if d.names & touched or d.sources & written]
            if i.op == "wait":
                handle = i.reads[0]
                waiting.append(_Deferred([i], set(self.posted[handle]), set(self.reads[handle])))
            elif needed and _may_wait(i) and bound.isdisjoint(map(root, i.outputs)):
                joined = _joined(needed)
                joined.instructions.append(i)
                joined.names.update(i.outputs)
                joined.sources.update(shared[x] for x in i.reads if x in shared)
                waiting = [d for d in waiting if d not in needed[1:]]
            else:
                for d in sorted(waiting, key=_is_idle) if i.op == "return" else needed:
                    done += d.instructions
                waiting = [] if i.op == "return" else [d for d in waiting if d not in needed]
                is_open = i.op in ("for", "block")
                done.append(replace(i, body=self.block(i.body, bound)) if is_open else i)
            bound.update(map(root, i.outputs))
        return (*done, *(i for d in waiting for i in d.instructions))


def _joined(needed: list[_Deferred]) -> _Deferred:
    """Make the first of some deferred waits all of them, and return it."""
    first = needed[0]
    for other in needed[1:]:
        first.instructions += other.instructions
        first.names |= other.names
        first.sources |= other.sources
    return first


def _is_idle(deferred: _Deferred) -> bool:
    """Return whether nothing is computed behind a wait: of those, others may come first."""
    return all(i.op == "wait" or _is_view(i) for i in deferred.instructions)


def _may_wait(i: Instruction) -> bool:
    """Return whether an instruction goes with a wait: a view, or work that costs little."""
    row, op = row_of(i), op_of(i)
    return _is_view(i) or (row is not None and op is not None and op.is_elementwise)


def _is_view(i: Instruction) -> bool:
    """Return whether an instruction reads no element, so that it may move past others."""
    row = row_of(i)
    return i.order is None and row is not None and row.is_pure_view
