"""Cut loops over chunks where they wait, so that the next chunk is posted before work on this one.

    for %i in 0..4 {                                for %i in 0..4 {
      %c0 = post broadcast(%x) -> %a.i                %c0 = post broadcast(%x) -> %a.i
      wait %c0                                        next
      %y.i = matmul(%a.i, %w)               ->        wait %c0
    }                                                 %y.i = matmul(%a.i, %w)
                                                    }

The parts that `next` divides take turns: the posts of chunk 1 come before the work of chunk 0. The
first part has what posts need that wait for nothing, the second what waits for these, and so on, in
three parts at most: so no more than three chunks are under way, and a buffer that one part fills
and the next one reads is there twice. What needs no post and no wait is in the second.

Loops over microbatches stay whole, since what a forward keeps would be there twice; and so do those
that write what other iterations read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import shared_operand, storage
from mdfuse.hir.indices import index_names
from mdfuse.hir.instructions import POSTS
from mdfuse.hir.program import HostProgram, Instruction, joined

name = "cut_loops"

#: The most parts of a loop.
PARTS = 3

#: Instructions of which the order between iterations matters, and loops whose posts are hidden.
_WHOLE = ("accumulate", "barrier", "for")


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with its loops over chunks cut where they wait."""
    if not any(i.op == "for" and _may_be_cut(i) for i in program.instructions):
        return program
    shared = storage(program)
    code = (
        replace(i, body=_cut(program, i, shared)) if i.op == "for" and _may_be_cut(i) else i
        for i in program.instructions
    )
    return replace(program, instructions=tuple(code))


def _may_be_cut(loop: Instruction) -> bool:
    inside = [j for i in loop.body for j in i.walk()]
    branched = [j for i in loop.body if i.op == "if" for j in i.walk()]
    waits = any(i.op == "wait" for i in loop.body)
    is_plain = not any(j.op in _WHOLE for j in inside)
    return waits and is_plain and not any(j.op in (*POSTS, "wait") for j in branched)


def grouped(body: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the instructions one by one, but those from group_start to group_end together."""
    found: list[list[Instruction]] = []
    is_open = False
    for i in body:
        if is_open:
            found[-1].append(i)
        else:
            found.append([i])
        is_open = i.op == "group_start" or (is_open and i.op != "group_end")
    return found


@dataclass(eq=False)
class _Unit:
    """An instruction of a loop, or a group of posts.

    Attributes:
        members: the instructions.
        names: that they use or make.
        made: the names that they make.
        read: the memory that they may read.
        written: the memory that they may write.
        part: in which part of the loop they are.
    """

    members: list[Instruction]
    names: set[str] = field(default_factory=set)
    made: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    part: int = 0

    def has(self, *ops: str) -> bool:
        return any(i.op in ops for i in self.members)

    @property
    def used(self) -> set[str]:
        return self.read | self.written


def _cut(
    program: HostProgram, loop: Instruction, shared: Mapping[str, str]
) -> tuple[Instruction, ...]:
    """Return the body of a loop with its parts apart; as it is where it cannot be cut."""
    units = list(_units(program, loop.body, shared))
    _place(units)
    last = max(u.part for u in units)
    if last == 0 or _meets_itself(program, loop, units, shared):
        return loop.body
    return joined([i for u in units if u.part == n for i in u.members] for n in range(last + 1))


def _units(
    program: HostProgram, body: Sequence[Instruction], shared: Mapping[str, str]
) -> Iterator[_Unit]:
    """Yield the units of a body, in order."""
    bound, posts = set[str](), dict[str, Instruction]()
    for members in grouped(body):
        unit = _Unit(members)
        for i in (j for member in members for j in member.walk()):
            if i.op in POSTS:
                posts[i.outputs[0]] = i
            post = posts[i.reads[0]] if i.op == "wait" else i
            into = post.reads[-1:] if post.op in ("post", "recv") else ()
            is_view = shared_operand(i) is not None and bound.isdisjoint(i.outputs)
            unit.names.update(i.reads, i.outputs, post.reads)
            unit.made.update(i.outputs)
            unit.read.update(_memory(program, shared, (*i.reads, *post.reads)))
            unit.written.update(_memory(program, shared, into if is_view else (*i.outputs, *into)))
        bound.update(unit.made)
        yield unit


def _memory(program: HostProgram, shared: Mapping[str, str], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        root = program.root(name)
        yield shared.get(root, root)


def _place(units: Sequence[_Unit]) -> None:
    """Say in which part of the loop each unit is: in one more than what it waits for.

    A unit stays behind those before it that make a name it uses, write memory it uses, or read
    memory that it writes.
    """
    behind = _Latest(), _Latest()  # the parts of these; and one more for those that post
    for unit in units:
        waits = unit.has("wait")
        unit.part = min(behind[waits].of(unit), PARTS - 1)
        for posts, latest in enumerate(behind):
            latest.add(unit, unit.part + (posts and unit.has(*POSTS)))
    names, used, written = set[str](), set[str](), set[str]()  # of the posts of the first part,
    first = set[_Unit]()  # and of what these need
    for unit in reversed(units):
        is_needed = not (
            names.isdisjoint(unit.made)
            and used.isdisjoint(unit.written)
            and written.isdisjoint(unit.read)
        )
        if unit.part == 0 and (unit.has(*POSTS) or is_needed):
            first.add(unit)
            names |= unit.names
            used |= unit.used
            written |= unit.written
    for unit in units:
        unit.part = max(unit.part, int(unit not in first))


@dataclass(eq=False)
class _Latest:
    """The latest part that must be over before a name or memory is used: name -> its number."""

    made: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def of(self, unit: _Unit) -> int:
        """Return the latest part that a unit stays behind; 0 where there is none."""
        ways = ((unit.names, self.made), (unit.used, self.written), (unit.written, self.read))
        return max((known.get(x, 0) for names, known in ways for x in names), default=0)

    def add(self, unit: _Unit, part: int) -> None:
        """Note what a unit makes, reads and writes."""
        for names, known in (
            (unit.made, self.made),
            (unit.read, self.read),
            (unit.written, self.written),
        ):
            known.update((x, part) for x in names if part > known.get(x, 0))


def _meets_itself(
    program: HostProgram, loop: Instruction, units: Sequence[_Unit], shared: Mapping[str, str]
) -> bool:
    """Return whether several parts use memory from outside of the loop that it writes.

    They may if each iteration has a chunk of its own there. What a post uses until its wait counts
    for the post alone.
    """
    inner = {x for u in units for x in _memory(program, shared, sorted(u.made)) if x in u.made}
    written = {x for u in units for x in u.written} - inner
    used: dict[str, set[object]] = defaultdict(set)
    for unit in units:
        for i in (j for member in unit.members for j in member.walk() if j.op != "wait"):
            if shared_operand(i) is not None:
                continue
            for n in (*i.reads, *i.outputs):
                (memory,) = _memory(program, shared, (n,))
                if memory in written:
                    used[memory].add(_chunk(program, loop, n) or unit.part)
    return any(len(ways) > 1 for ways in used.values())


def _chunk(program: HostProgram, loop: Instruction, name: str) -> object:
    """Return which chunk a name is, if it is that of the iteration; None where it is not."""
    kind = program.types.get(name)
    layout = kind.layout if kind is not None else None
    if layout is None or layout.stream is None:
        return None
    probe = Instruction(op="chunk", outputs=(name,))
    return layout.stream if loop.outputs[0] in index_names(probe, program.types) else None
