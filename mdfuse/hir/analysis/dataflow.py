"""The facts about the names of a program: shared memory, uses, streams.

One walk over a program yields the facts about its names, one over its instructions those about
positions. All passes, plans and costs ask the same facts: `dataflow(program)`.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mdfuse.hir.instructions import POSTS, received, row_of
from mdfuse.hir.once import note, once
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.layouts.boxes import Box, intersect

#: Views of rows of a memory.
VIEWS = ("chunk", "select")


def shared_operand(i: Instruction) -> str | None:
    """Return the operand whose memory the result of an instruction may share; None: there is none.

    Also where a memory order is required: an operand that lies so already is not copied.
    """
    row = row_of(i)
    return i.reads[0] if row is not None and row.is_view and i.reads else None


def current_streams(code: Sequence[Instruction]) -> list[Instruction | None]:
    """Return for each instruction the `set_stream` that is in force behind it, of the same code.

    None: the stream is that which was current before the code.
    """
    current: Instruction | None = None
    streams = []
    for i in code:
        current = i if i.op == "set_stream" else current
        streams.append(current)
    return streams


def grouped(body: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the instructions one by one, but those from group_start to group_end together."""
    groups: list[list[Instruction]] = []
    is_open = False
    for i in body:
        if is_open:
            groups[-1].append(i)
        else:
            groups.append([i])
        is_open = i.op == "group_start" or (is_open and i.op != "group_end")
    return groups


@dataclass(frozen=True, slots=True)
class Effects:
    """The names and the memory that instructions read and write.

    Attributes:
        reads, writes: names, and memory by its name.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()

    def __or__(self, other: Effects) -> Effects:
        return Effects(self.reads | other.reads, self.writes | other.writes)

    @staticmethod
    def union(effects: Sequence[Effects]) -> Effects:
        """Return the effects of several instructions together."""
        return Effects(
            frozenset().union(*[e.reads for e in effects]),
            frozenset().union(*[e.writes for e in effects]),
        )

    def meet(self, other: Effects) -> bool:
        """Return whether instructions must keep their order: one writes what the other uses."""
        return not (
            self.writes.isdisjoint(other.reads)
            and self.writes.isdisjoint(other.writes)
            and self.reads.isdisjoint(other.writes)
        )


@dataclass(frozen=True, eq=False)
class Dataflow:
    """The uses of the names of a program, and of their memory.

    A position is an index into the program's instructions; instructions in a loop, a branch or a
    block have its position. A host unit uses the names of its inputs and outputs.

    Attributes:
        code: the instructions.
        types: the types of the names.
        rank: whose projection it is; None for the global program.
        bases: name -> the names in whose memory it may lie; the last one has memory of its own. The
            others, the name itself among them, are results that may be copies: a pad, or a result
            of a required memory order, is a copy on some ranks and a view on others.
        memories: name -> the last one of these.
        binders: name -> the first instruction that has it as a result; None for inputs.
        posts: handle -> the instruction that posts.
    """

    code: tuple[Instruction, ...]
    types: Mapping[str, BufferType]
    rank: int | None
    bases: dict[str, tuple[str, ...]]
    memories: dict[str, str]
    binders: dict[str, Instruction | None]
    posts: dict[str, Instruction]
    _effects: dict[int, tuple[Instruction, Effects]] = field(default_factory=dict)

    # -- names and memory ------------------------------------------------------------------------

    def memory(self, name: str) -> str:
        """Return the name whose memory a name may share; itself where it has memory of its own."""
        return self.memories.get(name, name)

    def is_bound_by(self, name: str, i: Instruction) -> bool:
        """Return whether an instruction makes a value of a name, and does not write into one."""
        return self.binders.get(name, i) is i

    def is_given(self, name: str) -> bool:
        """Return whether the memory of a name is that of an input."""
        memory = self.memory(name)
        return memory in self.binders and self.binders[memory] is None

    def effects(self, i: Instruction) -> Effects:
        """Return the effects of an instruction, with those inside it.

        A wait has the effects of its post. Binding a view writes its name, and no memory.
        """
        known = self._effects.get(id(i))
        if known is None or known[0] is not i:
            known = self._effects[id(i)] = i, self._effects_of(i)
        return known[1]

    def _effects_of(self, i: Instruction) -> Effects:
        memories, reads, writes = self.memories, set[str](), set[str]()
        for j in i.walk():
            names, into = j.reads, received(j) if j.op in POSTS else ()
            if j.op == "wait":
                post = self.posts.get(j.reads[0], j)  # a wrong program may have none
                names, into = (*names, *post.reads), received(post)
            elif j.outputs and j.op != "launch":
                shared = [x for x in j.outputs if memories.get(x, x) != x]
                if shared and shared_operand(j) is not None:
                    shared = [x for x in shared if not self.is_bound_by(x, j)]
                into += tuple(shared)
            reads.update(names, [memories[x] for x in names if x in memories])
            writes.update(j.outputs, [memories.get(x, x) for x in into])
        return Effects(frozenset(reads), frozenset(writes))

    @cached_property
    def sharing(self) -> Mapping[str, Sequence[str]]:
        """Memory -> the names that may share it."""
        sharing = defaultdict[str, list[str]](list)
        for name, memory in self.memories.items():
            sharing[memory].append(name)
        return sharing

    # -- positions -------------------------------------------------------------------------------

    @cached_property
    def uses(self) -> Mapping[str, Sequence[int]]:
        """Name -> the positions at which it is read, bound, written or freed, in order."""
        uses = defaultdict[str, list[int]](list)
        for n, names in enumerate(self._names):
            for name in names:
                uses[name].append(n)
        return uses

    @cached_property
    def touches(self) -> Mapping[str, Sequence[tuple[int, str]]]:
        """Memory -> (position, name) of each use of it, in order."""
        touches = defaultdict[str, list[tuple[int, str]]](list)
        for n, names in enumerate(self._names):
            for name in names:
                touches[self.memories.get(name, name)].append((n, name))
        return touches

    @cached_property
    def _names(self) -> Sequence[Iterable[str]]:
        """For each position the names that are used there, each once."""
        return [dict.fromkeys(_used(i)) for i in self.code]

    def last_use(self, name: str) -> int:
        """Return where the memory of a name is used last; a wait uses it as its post."""
        memory = self.memory(name)
        ends = [self.uses[x][-1] for x in self._handles.get(memory, ())]
        return max(self.touches[memory][-1][0], *ends) if ends else self.touches[memory][-1][0]

    @cached_property
    def _handles(self) -> Mapping[str, Sequence[str]]:
        """Memory -> the handles of posts that use it."""
        handles = defaultdict[str, list[str]](list)
        for handle, post in self.posts.items():
            for x in {*map(self.memory, (*post.reads, *received(post)))}:
                handles[x].append(handle)
        return handles

    @cached_property
    def used_at(self) -> Mapping[str, Sequence[int]]:
        """Name, or memory by its name -> where it is used, in order; a wait uses as its post."""
        positions = defaultdict[str, list[int]](list)
        for n, i in enumerate(self.code):
            effects = self.effects(i)
            for name in effects.reads | effects.writes:
                positions[name].append(n)
        return positions

    @cached_property
    def written_at(self) -> Mapping[str, Sequence[int]]:
        """Memory -> the positions at which it is written, in order; names -> where they are."""
        positions = defaultdict[str, list[int]](list)
        for n, i in enumerate(self.code):
            for name in self.effects(i).writes:
                positions[name].append(n)
        return positions

    def last_write(self, name: str, before: int) -> int:
        """Return where the memory of a name is last written before a position; -1: nowhere."""
        positions = self.written_at.get(self.memory(name), ())
        n = bisect_left(positions, before)
        return positions[n - 1] if n else -1

    def is_own(self, name: str) -> bool:
        """Return whether a name has plain memory of its own, which is no input's."""
        binder = self.binders.get(name)
        is_plain = binder is not None and not (binder.op == "alloc" and binder.attrs)
        return is_plain and self.memory(name) == name

    def may_lie_over(self, result: str, operand: str, at: int) -> bool:
        """Return whether the result of an instruction at a position may lie where an operand does.

        Both have one type, and nothing uses the operand's memory behind the position. An
        instruction must then read each element of the operand before it writes the element.
        """
        is_alike = self.types.get(operand) == self.types[result] and self.is_own(operand)
        return is_alike and self.last_use(operand) <= at

    def bound_at(self, name: str) -> int:
        """Return where a name is bound; -1 for inputs."""
        return self.uses[name][0] if self.binders.get(name) is not None else -1

    @cached_property
    def streams(self) -> Sequence[Instruction | None]:
        """For each position the `set_stream` that is in force there; see `current_streams`."""
        return current_streams(self.code)

    def results(self, name: str) -> list[int]:
        """Return where a name is bound or written, as a result."""
        return [n for n in self.uses.get(name, ()) if name in self.code[n].outputs]

    def readers(self, name: str) -> list[int]:
        """Return where a name is read."""
        return [n for n in self.uses.get(name, ()) if name in self.code[n].reads]

    def ops(self, name: str) -> list[str]:
        """Return the ops that use a name, in order."""
        return [self.code[n].op for n in self.uses[name]]

    def accesses(self, into: str) -> Iterator[int]:
        """Yield the positions of reads and writes of elements of a name, and of ends of posts."""
        for n, name in self.touches[self.memory(into)]:
            i = self.code[n]
            is_idle = i.op in ("alloc", "free", *VIEWS) and "fill" not in i.kwargs
            if is_idle or not self.meet(into, name):
                continue
            yield n
            if i.op in POSTS:
                yield from self.uses[i.outputs[0]][1:] or [len(self.code)]

    # -- regions of a projection -----------------------------------------------------------------

    def meet(self, a: str, b: str) -> bool:
        """Return whether two names of one memory may share elements."""
        x, y = self.region(a), self.region(b)
        return x is None or y is None or intersect(x, y) is not None

    def region(self, name: str) -> Box | None:
        """Return the elements of its memory that a name stands for, as rows of each dim.

        None where it is a view of something else than rows.
        """
        bind = self.binders.get(name)
        if bind is not None and bind.op == "own":  # a rank's term of its rows
            (name,) = bind.reads
        region = list(self.box(name))
        while (bind := self.binders.get(name)) is not None and bind.op in VIEWS:
            (name,) = bind.reads
            if bind.op == "select":
                whole = self.box(name)
                dim = bind.kwargs["dim"] % len(whole)
                start = range(*whole[dim])[bind.kwargs["index"]]
                region.insert(dim, (start, start + 1))
        return tuple(region) if name == self.memory(name) else None

    def box(self, name: str) -> Box:
        """Return the rows that a rank has of a name."""
        assert self.rank is not None
        return self.types[name].box(self.rank)


@once
def dataflow(program: HostProgram) -> Dataflow:
    """Return the facts about a program; they are computed once."""
    bases: dict[str, tuple[str, ...]] = {name: (name,) for name in program.inputs}
    binders: dict[str, Instruction | None] = dict.fromkeys(program.inputs)
    posts: dict[str, Instruction] = {}
    for i in program.walk():
        if not i.outputs or i.op == "launch":
            continue
        if i.op in POSTS:
            posts[i.outputs[0]] = i
        operand = shared_operand(i)
        of = program.root(operand) if operand is not None else None
        for name in map(program.root, i.outputs) if program.aliases else i.outputs:
            binders.setdefault(name, i)
            if name not in bases:  # later instructions write into its buffer
                shared = bases.get(of, (of,)) if of is not None else ()
                may_be_own = of is None or i.order is not None or i.op == "pad"
                bases[name] = (name, *shared) if may_be_own else shared
    for alias, root in {alias: program.root(alias) for alias in program.aliases}.items():
        bases[alias], binders[alias] = bases.get(root, (root,)), binders.get(root)
    return Dataflow(
        code=program.instructions,
        types=program.types,
        rank=program.rank,
        bases=bases,
        memories={name: of[-1] for name, of in bases.items()},
        binders=binders,
        posts=posts,
    )


def with_code(program: HostProgram, code: Sequence[Instruction]) -> HostProgram:
    """Return a program with the same work in another order, or in other units; or itself.

    The facts about its names are then the same, but for places.
    """
    flow = dataflow(program)
    if len(code) == len(flow.code) and all(map(operator.is_, code, flow.code)):
        return program
    new = replace(program, instructions=tuple(code))
    note(dataflow, new, replace(flow, code=new.instructions))
    return new


@once
def pinned(program: HostProgram) -> frozenset[str]:
    """Return the names that are in use whoever reads them: inputs, outputs, what shares a place."""
    aliases = {*program.aliases, *map(program.root, program.aliases)}
    return frozenset({*program.inputs, *program.outputs, *aliases})


def storage(program: HostProgram) -> dict[str, str]:
    """Return name -> the name whose memory it may share; itself where it has memory of its own."""
    return dataflow(program).memories


def _used(i: Instruction) -> Iterable[str]:
    """Return the names that an instruction uses, and those that a block's instructions do."""
    if i.op == "launch" or not (i.body or i.orelse):
        return (*i.reads, *i.outputs)
    inside = (x for j in (*i.body, *i.orelse) for x in _used(j))
    return (*i.reads, *i.outputs, *inside)
