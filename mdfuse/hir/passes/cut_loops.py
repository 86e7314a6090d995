"""Cut loops over chunks where they wait, so that the next chunk is posted before work on this one.

    for %i in 0..4 {                                for %i in 0..4 {
      %c0 = post broadcast(%x) -> %a.i                %c0 = post broadcast(%x) -> %a.i
      wait %c0                                        next
      %y.i = matmul(%a.i, %w)               ->        wait %c0
    }                                                 %y.i = matmul(%a.i, %w)
                                                    }

The parts that `next` divides take turns: the posts of chunk 1 come before the work of chunk 0. The
first part computes the operands of posts that wait for nothing, the second waits for these, and so
on, in three parts at most: so no more than three chunks are under way, and a buffer that one part
fills and the next one reads exists twice. Work without posts and waits is in the second part. Work
that no post needs stays behind the waits before it, where it may be in one kernel with other work.

Loops over microbatches stay whole, since the saved values of a forward would exist twice; and so do
loops that write what other iterations read. Received and added chunks of a ring exist twice anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, Effects, dataflow, grouped, shared_operand
from mdfuse.hir.index_terms import index_names
from mdfuse.hir.instructions import POSTS, TRANSFERS
from mdfuse.hir.program import HostProgram, Instruction, joined

name = "cut_loops"

#: The most parts of a loop.
PARTS = 3

#: Instructions of which the order between iterations matters, and loops whose posts are hidden.
_WHOLE = ("barrier", "for")


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with its loops over chunks cut where they wait."""
    if not any(i.op == "for" and _may_be_cut(i) for i in program.instructions):
        return program
    code = (
        replace(i, body=_cut(program, i)) if i.op == "for" and _may_be_cut(i) else i
        for i in program.instructions
    )
    return replace(program, instructions=tuple(code))


def _may_be_cut(loop: Instruction) -> bool:
    inside = [j for i in loop.body for j in i.walk()]
    branched = [j for i in loop.body if i.op == "if" for j in i.walk()]
    waits = any(i.op == "wait" for i in loop.body)
    is_ring = any(j.op in TRANSFERS for j in inside)
    is_plain = not any(j.op in _WHOLE or (j.op == "accumulate" and not is_ring) for j in inside)
    return waits and is_plain and not any(j.op in (*POSTS, "wait") for j in branched)


@dataclass(eq=False)
class _Unit:
    """An instruction of a loop, or a group of posts.

    Attributes:
        members: the instructions.
        effects: what they read and write.
        part: in which part of the loop they are.
        is_posted: whether a post needs it.
    """

    members: list[Instruction]
    effects: Effects
    part: int = 0
    is_posted: bool = False

    def has(self, *ops: str) -> bool:
        return any(i.op in ops for i in self.members)


def _cut(program: HostProgram, loop: Instruction) -> tuple[Instruction, ...]:
    """Return the body of a loop with its parts apart; as it is where it cannot be cut."""
    flow = dataflow(program)
    units = [_Unit(g, reduce(or_, map(flow.effects, g))) for g in grouped(loop.body)]
    _place(units)
    last = max(u.part for u in units)
    if last == 0 or _meets_itself(flow, loop, units):
        return loop.body
    return joined([i for u in units if u.part == n for i in u.members] for n in range(last + 1))


def _place(units: Sequence[_Unit]) -> None:
    """Set the part of the loop of each unit: one behind the posts that it waits for.

    A unit stays behind those before it that make a name it uses, write memory it uses, or read
    memory that it writes. No post passes a fetch by which all ranks refuse a run.
    """
    behind = _Latest(), _Latest()  # the parts of these; and one more for those that post
    refused = 0
    for unit in units:
        waits = unit.has("wait")
        unit.part = max(min(behind[waits].of(unit), PARTS - 1), refused)
        if any(i.op == "fetch" and "each" in i.kwargs for i in unit.members):
            refused = unit.part
        for posts, latest in enumerate(behind):
            latest.add(unit, unit.part + (posts and unit.has(*POSTS)))
    needs, first = Effects(), set[_Unit]()  # the posts of the first part, and what these need
    for unit in reversed(units):
        if unit.part == 0 and (unit.has(*POSTS) or needs.meet(unit.effects)):
            first.add(unit)
            needs |= unit.effects
    for unit in units:
        unit.part = max(unit.part, int(unit not in first))
    needs, waited = Effects(), 0
    for unit in reversed(units):
        unit.is_posted = unit.has(*POSTS) or needs.meet(unit.effects)
        needs |= unit.effects if unit.is_posted else Effects()
    for unit in units:
        waited = max(waited, unit.part) if unit.has("wait") else waited
        unit.part = unit.part if unit.is_posted else max(unit.part, waited)


@dataclass(eq=False)
class _Latest:
    """The latest part that must be over before a name or memory is used: name -> its number."""

    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def of(self, unit: _Unit) -> int:
        """Return the latest part that a unit stays behind; 0 where there is none."""
        reads, writes = unit.effects.reads, unit.effects.writes
        ways = ((reads | writes, self.written), (writes, self.read))
        return max((known.get(x, 0) for names, known in ways for x in names), default=0)

    def add(self, unit: _Unit, part: int) -> None:
        """Note what a unit reads and writes."""
        ways = ((unit.effects.reads, self.read), (unit.effects.writes, self.written))
        for names, known in ways:
            known.update((x, part) for x in names if part > known.get(x, 0))


def _meets_itself(flow: Dataflow, loop: Instruction, units: Sequence[_Unit]) -> bool:
    """Return whether several parts use memory from outside of the loop that it writes.

    They may if each iteration has a chunk of its own there. What a post uses until its wait counts
    for the post alone.
    """
    inside = [(j, unit.part) for unit in units for i in unit.members for j in i.walk()]
    bound = {x for j, _ in inside for x in j.outputs if flow.is_bound_by(x, j)}
    written = frozenset().union(*(u.effects.writes for u in units)) - bound
    used: dict[str, set[object]] = defaultdict(set)
    for i, part in inside:
        if i.op == "wait" or shared_operand(i) is not None:
            continue
        for name in (*i.reads, *i.outputs):
            if flow.memory(name) in written:
                used[flow.memory(name)].add(_chunk(flow, loop, name) or part)
    return any(len(ways) > 1 for ways in used.values())


def _chunk(flow: Dataflow, loop: Instruction, name: str) -> object:
    """Return which chunk a name is, if it is that of the iteration; None where it is not."""
    kind = flow.types.get(name)
    layout = kind.layout if kind is not None else None
    if layout is None or layout.stream is None:
        return None
    probe = Instruction(op="chunk", outputs=(name,))
    return layout.stream if loop.outputs[0] in index_names(probe, flow.types) else None
