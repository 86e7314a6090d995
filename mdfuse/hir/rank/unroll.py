"""Write out one rank's instructions in the order in which they run: no loop, no branch, no alias.

    for %i in 0..2 {                                    %x.i@1: … chunk(0,2,0) = chunk(%x)
      %x.i: … chunk(0,2,%i) = chunk(%x)        ->       %y.i@1 = add(%x.i@1, 0)
      %y.i = add(%x.i, %i)                              %x.i@2: … chunk(0,2,1) = chunk(%x)
    }                                                   %y.i@2 = add(%x.i@2, 1)

Loop bounds and branches are index expressions, so a projection can be written out before it runs.
Before each iteration the values that depend on the index are dropped: here they get a new name.
What had a buffer before the loop keeps it, unless an earlier loop left it there. Where `next`
divides a loop, the parts of iterations take turns, each with the names of its own iteration. A call
writes out its block; what belongs to its index is named by it, `%h@3`, in whichever block it is
made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mdfuse.communication import Communication
from mdfuse.errors import ProgramError
from mdfuse.extents.expressions import UNKNOWN, Index, Term, resolve
from mdfuse.hir.block_calls import blocks_of, per_index
from mdfuse.hir.index_terms import index_names
from mdfuse.hir.instructions import POSTS, TRANSFERS, op_of
from mdfuse.hir.program import BufferType, HostProgram, Instruction, resolved
from mdfuse.hir.rank.localize import globalized, localized
from mdfuse.ir.graph import Operand
from mdfuse.layouts.layout import Layout

#: The most instructions, or iterations, that are written out.
LIMIT = 1_000_000


def write(program: HostProgram) -> HostProgram:
    """Write out a projection; the names of iterations are `name@1`, `name@2`, …

    Raises:
        ProgramError: aliases in a cycle; a step of 0; more than a million instructions; a name is
            read that no branch which the rank takes makes.
    """
    if program.rank is None:
        raise ProgramError("only one rank's program is written out", hint="project it first")
    if program.is_straight and not program.aliases:
        return program
    return Unrolled(program).write()


def _never_made(program: HostProgram, name: str) -> ProgramError:
    return ProgramError(
        f"@{program.name} reads %{name} on rank {program.rank}, where nothing made it",
        where=f"host @{program.name}",
        because="each run starts with an empty table of values",
        hint="compute it in both branches",
    )


@dataclass(slots=True)
class Turn:
    """An iteration of a loop, or several that are written as one, which is under way.

    Attributes:
        numbers: what the index is in each.
        names: name -> what it is called in this iteration.
        bound: those of them that have a buffer.
    """

    numbers: range
    names: dict[str, str]
    bound: set[str] = field(default_factory=set)


class _InstructionTemplate(NamedTuple):
    """The part of an instruction that is alike in all iterations.

    Attributes:
        inputs: what it reads, with the names whose buffers these are.
        outputs: the names whose buffers it binds.
        freed: those that it frees.
        is_fixed: it has no name, number or communication.
        has_indices: an index is among its operands or attributes, or in its body.
        is_of_part: it depends on the part that the rank has in an iteration.
        kinds: of its outputs, the types that the program has for them.
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[str, ...]
    freed: tuple[str, ...]
    is_fixed: bool
    has_indices: bool
    is_of_part: bool
    kinds: tuple[BufferType | None, ...]


@dataclass
class Unrolled:
    """A walk over a projection that writes down what runs, in order."""

    program: HostProgram
    code: list[Instruction] = field(default_factory=list)
    types: dict[str, BufferType] = field(default_factory=dict)
    #: name in the program -> name of the iteration
    names: dict[str, str] = field(default_factory=dict)
    versions: Counter[str] = field(default_factory=Counter)
    #: loop index -> its number
    env: dict[str, int] = field(default_factory=dict)
    #: names that have a buffer, and those of them whose buffer a finished loop left
    bound: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    #: index of calls -> those of its names that have a buffer
    bound_at: dict[int, set[str]] = field(default_factory=dict)
    #: what follows a name in a call, before the number of an iteration
    of_call: str = ""
    #: how many iterations of all loops there were
    iterations: int = 0
    #: id of a loop -> what `inside` and `dependent` return for it
    _inside: dict[int, int] = field(default_factory=dict)
    _dependent: dict[int, list[str]] = field(default_factory=dict)
    #: layout of a chunk, its number -> the layout with that number
    _layouts: dict[tuple[Layout, object], Layout] = field(default_factory=dict)
    #: id of a type of the program -> id of the first one that equals it
    _equal: dict[int, int] = field(default_factory=dict)
    #: such an id -> the type as long as all indices are what they are now
    _kinds: dict[int, BufferType] = field(default_factory=dict)
    #: communication of the program -> what it is as long as all indices are what they are now
    _comms: dict[Communication, Communication] = field(default_factory=dict)
    #: id of an instruction -> what is the same of it in every iteration
    _sites: dict[int, _InstructionTemplate] = field(default_factory=dict)
    #: the program with the types that were found so far
    local: HostProgram = field(init=False)

    #: the blocks, and the names that belong to the index of a call
    blocks: Mapping[str, Instruction] = field(init=False)
    per_index: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks, self.per_index = blocks_of(self.program), per_index(self.program)
        self.local = replace(self.program, types=self.types, aliases={})
        first: dict[BufferType, int] = {}
        for kind in {id(k): k for k in self.program.types.values()}.values():
            self._equal[id(kind)] = first.setdefault(kind, id(kind))

    def write(self) -> HostProgram:
        program = self.program
        for name in (*program.inputs, *program.outputs):
            self.types[program.root(name)] = program.types[program.root(name)]
        self.bound.update(program.inputs)
        try:
            self.block(program.instructions)
        except KeyError as error:  # the type of a name that was made in a branch not taken
            raise _never_made(program, error.args[0]) from None
        return replace(
            program,
            types=self.types,
            inputs=tuple(map(self.name, program.inputs)),
            outputs=tuple(map(self.name, program.outputs)),
            instructions=tuple(self.code),
            aliases={},
        )

    def name(self, name: str) -> str:
        root = self.program.root(name)
        return self.names.get(root, root)

    def known(self, term: Term) -> int | None:
        if term.kind == "index":
            return self.env.get(term.name)
        if term.kind == "extent":
            kind = self.types.get(self.name(term.name))
            return kind.local_shape(self.program.rank)[term.dim] if kind is not None else None
        return None

    def number(self, index: Index, what: str, i: Instruction) -> int:
        value = resolve(index, self.known)
        if isinstance(value, int):
            return value
        raise self.unknown(value, what, i)

    def unknown(self, index: Index, what: str, i: Instruction) -> ProgramError:
        return ProgramError(
            f"@{self.program.name} on rank {self.program.rank}: {what} {index} has no value",
            where=[i.source.quote()] if i.source else (),
            because="an index is known inside its loop only, an extent where there is a buffer",
            hint="move the instruction into the loop, or write a number",
        )

    def block(self, block: tuple[Instruction, ...]) -> None:
        for i in block:
            match i.op:
                case "for":
                    self.loop(i)
                case "block":
                    pass  # its calls write it out
                case "call":
                    self.call(i)
                case "if":
                    test = self.number(i.kwargs["test"], "the branch on", i)
                    self.block(i.body if test else i.orelse)
                case _:
                    self.append(i)

    def call(self, i: Instruction) -> None:
        """Write out a block at one index; the names of that index are its own."""
        block, number = self.blocks[i.fn], self.number(i.kwargs["index"], "the call's index", i)
        (index,) = block.outputs
        self.set_index(index, number)
        self.of_call = f"@{number}"
        self.names.update((name, f"{name}@{number}") for name in self.per_index)
        self.bound |= self.bound_at.get(number, set())
        self.block(block.body)
        self.bound_at[number] = self.bound & self.per_index
        self.bound -= self.per_index
        for name in self.per_index:
            del self.names[name]
        self.set_index(index, None)
        self.of_call = ""

    def loop(self, i: Instruction) -> None:
        (index,) = i.outputs
        start, stop, step = (
            self.number(i.kwargs[k], f"the loop's {k}", i) for k in ("start", "stop", "step")
        )
        if step == 0:
            raise ProgramError(
                f"@{self.program.name}: a loop over %{index} with step 0",
                where=[i.source.quote()] if i.source else (),
                because="it would never end",
            )
        self.count(_iterations(start, stop, step), i)
        live = self.bound - self.left
        dropped = [n for n in self.dependent(i) if n not in live]
        outer = self.env.get(index)
        self.iterate(i, self.turns(i, range(start, stop, step)), dropped)
        self.left.update(self.bound.intersection(dropped))
        self.set_index(index, outer)

    def set_index(self, index: str, number: int | None) -> None:
        """Note what an index is from now on; None: it is over."""
        self._kinds.clear()
        self._comms.clear()
        if number is None:
            self.env.pop(index, None)
        else:
            self.env[index] = number

    def turns(self, loop: Instruction, numbers: range) -> Sequence[range]:
        """Return the iterations of a loop, in runs that are written as one: here each by itself."""
        return [numbers[at : at + 1] for at in range(len(numbers))]

    def iterate(self, loop: Instruction, turns: Sequence[range], dropped: list[str]) -> None:
        """Write out the iterations of a loop: the first part of each goes ahead of earlier ones.

        Args:
            loop: the loop.
            turns: what its index is in each, as `turns` returns it.
            dropped: names that have no value before each.
        """
        parts = loop.parts
        under_way: list[Turn] = []  # the latest first
        for at in range(len(turns) + len(parts) - 1):
            if at < len(turns):
                under_way.insert(0, Turn(turns[at], self.fresh(dropped)))
            late = max(at - len(turns) + 1, 0)
            for part, turn in zip(parts[late:], under_way, strict=False):
                self.part(loop, part, turn)
            if len(under_way) == len(parts) - late:
                under_way.pop()

    def fresh(self, dropped: list[str]) -> dict[str, str]:
        """Return what names are called in a new iteration."""
        for name in dropped:
            self.versions[name] += 1
        self.left.difference_update(dropped)
        return {name: f"{name}{self.of_call}@{self.versions[name]}" for name in dropped}

    def part(self, loop: Instruction, part: tuple[Instruction, ...], turn: Turn) -> None:
        """Write out a part of the body of a loop, with the names of one iteration."""
        self.set_index(loop.outputs[0], turn.numbers[0])
        self.names.update(turn.names)
        self.bound.difference_update(turn.names)
        self.bound |= turn.bound
        self.block(part)
        turn.bound = self.bound.intersection(turn.names)

    def count(self, iterations: int, i: Instruction) -> None:
        """Count a loop's iterations; raise ProgramError if they are more than a plan can hold."""
        self.iterations += iterations
        surely = self.iterations + iterations * self.inside(i)
        if surely > LIMIT:
            raise ProgramError(
                f"@{self.program.name}: with the loop over %{i.outputs[0]} it runs "
                f"{surely} iterations",
                where=[i.source.quote()] if i.source else (),
                because=f"loops are written out before they run, up to {LIMIT} iterations",
                hint="loop over fewer, larger pieces",
            )

    def inside(self, loop: Instruction) -> int:
        """Return how many nested iterations one iteration has, as far as bounds are numbers."""
        if id(loop) not in self._inside:
            loops = [i for i in loop.body if i.op == "for"]
            count = sum(_surely(i) * (1 + self.inside(i)) for i in loops)
            self._inside[id(loop)] = count
        return self._inside[id(loop)]

    def dependent(self, loop: Instruction) -> list[str]:
        """Return the names that belong to an iteration of a loop.

        What it computes from its index, and the handles of its posts; all where `next` divides it.
        """
        if id(loop) not in self._dependent:
            self._dependent[id(loop)] = self._computed(loop)
        return self._dependent[id(loop)]

    def _computed(self, loop: Instruction) -> list[str]:
        (index,) = loop.outputs
        values: dict[str, None] = {index: None}
        is_divided = len(loop.parts) > 1  # then a value may be read after the next one is made
        for i in (inner for top in loop.body for inner in top.walk()):
            if not i.outputs:
                continue
            if is_divided or i.op in POSTS or self.depends(i, index, values):
                values.update(dict.fromkeys(map(self.program.root, i.outputs)))
        del values[index]
        return list(values)

    def depends(self, i: Instruction, index: str, names: Mapping[str, None]) -> bool:
        """Return whether an instruction has an index, or reads what is computed from it."""
        if index in index_names(i, self.program.types):
            return True
        return any(self.program.root(n) in names for n in i.reads)

    def append(self, i: Instruction) -> None:
        if len(self.code) >= LIMIT:
            raise ProgramError(
                f"@{self.program.name} runs more than {LIMIT} instructions",
                because="a plan holds one prepared call for each",
                hint="loop over fewer, larger pieces",
            )
        site = self._sites.get(id(i)) or self.site(i)
        if site.is_fixed:
            self.code.append(i)  # the same in every iteration
            return
        if site.outputs:
            self.bound.update(site.outputs)
            self.left.difference_update(site.outputs)
        if site.freed:
            self.bound.difference_update(site.freed)
        i = self.renamed(i)
        if site.has_indices:
            for index in (x for inner in (i, *i.body) for x in inner.indices):
                raise self.unknown(index, f"{i.fn or i.op}: the index", i)
        self.code.append(i)

    def site(self, i: Instruction) -> _InstructionTemplate:
        inputs, outputs, types = i.inputs, i.outputs, self.program.types
        if self.program.aliases:
            root = self.program.root
            inputs = tuple([root(x) if type(x) is str else x for x in inputs])
            outputs = tuple(map(root, outputs))
        has_own = bool((i.attrs or i.inputs) and i.indices)
        template = self._sites[id(i)] = _InstructionTemplate(
            inputs=inputs,
            outputs=outputs,
            freed=tuple([x for x in inputs if type(x) is str]) if i.op == "free" else (),
            is_fixed=not (inputs or outputs or i.comm or has_own),
            has_indices=has_own or any(j.indices for j in i.body),
            is_of_part=self.is_of_part(i),
            kinds=tuple(map(types.get, outputs)),
        )
        return template

    def renamed(self, i: Instruction) -> Instruction:
        """Return an instruction with the names, numbers and types of this iteration."""
        site = self._sites.get(id(i)) or self.site(i)
        names, operand, types = self.names, self.operand, self.types
        inputs = tuple([operand(x) for x in site.inputs])
        outputs = tuple([names.get(root, root) for root in site.outputs])
        for new, kind in zip(outputs, site.kinds, strict=True):
            if kind is not None:
                is_whole = kind.layout is None or kind.layout.stream is None
                kind = kind if is_whole else self.at(new, kind, i)
                if kind.counts is not None:
                    kind = replace(kind, counts=self.name(kind.counts))
                types[new] = kind
        body = tuple([self.renamed(j) for j in i.body]) if i.body else ()
        comm = self.posted(i.comm) if i.comm is not None else None
        attrs = resolved(i.attrs, self.known) if site.has_indices else i.attrs
        i = i.rebuilt(inputs, outputs, attrs, comm, body, i.orelse)
        if not (site.is_of_part and self.env):
            return i
        rank = self.local.rank
        assert rank is not None
        i = globalized(self.local, i, rank)
        return localized(self.local, i, rank, self.local.knows(rank))

    def is_of_part(self, i: Instruction) -> bool:
        """Return whether an instruction depends on the part that the rank has in this iteration."""
        op = op_of(i)
        return op.localize is not None if op is not None else i.op in TRANSFERS

    def at(self, name: str, kind: BufferType, i: Instruction) -> BufferType:
        """Return a type in this iteration; raise ProgramError where its chunk does not exist."""
        kind = self.kind(kind)
        stream = kind.layout.stream if kind.layout is not None else None
        index = stream.index if stream is not None else None
        if stream is not None and isinstance(index, int) and not 0 <= index < stream.count:
            raise ProgramError(
                f"@{self.program.name}: {i.fn or i.op} -> %{name}: there is no chunk {index}"
                + (f" of dim {stream.dim}" if stream.op is None else "")
                + f": it has {stream.count}",
                where=[i.source.quote()] if i.source else (),
                because=f"chunks count from 0 to {stream.count - 1}",
                hint="let the loop run over the chunks that there are",
            )
        return kind

    def kind(self, kind: BufferType) -> BufferType:
        """Return `type_now` of a type of the program, which is asked once in an iteration."""
        if kind.layout is None or kind.layout.stream is None:
            return kind
        code = self._equal.get(id(kind), id(kind))
        local = self._kinds.get(code)
        if local is None:
            local = self.type_now(kind)
            if local.layout is None or is_numbered(local.layout):
                self._kinds[code] = local
        return local

    def type_now(self, kind: BufferType) -> BufferType:
        """Return a type as it is in this iteration."""
        layout = kind.layout
        chunk = layout.stream if layout is not None else None
        if layout is None or chunk is None or chunk.index is None or isinstance(chunk.index, int):
            return kind
        key = layout, resolve(chunk.index, self.known)
        local = self._layouts.get(key)
        if local is None:
            local = self._layouts[key] = layout.at(self.known)
        return kind if local is layout else replace(kind, layout=local)

    def posted(self, comm: Communication) -> Communication:
        """Return a communication as it is in this iteration."""
        local = self._comms.get(comm)
        if local is None:
            local = comm.at(self.known)
            if is_numbered(local.source) and is_numbered(local.destination):
                self._comms[comm] = local
        return local

    def operand(self, x: Operand) -> Operand:
        """Return what an operand, a name with a buffer of its own if any, is in this iteration.

        The name has a type even where nothing has bound it.
        """
        if type(x) is not str:
            return resolve(x, self.known) if type(x) in UNKNOWN else x
        if x in self.env:
            return self.env[x]
        new = self.names.get(x, x)
        if new not in self.types:
            kind = self.program.types.get(x)
            if kind is not None:
                self.types[new] = self.kind(kind)
        return new


def is_numbered(layout: Layout) -> bool:
    """Return whether a layout is that of no chunk, or of one whose number is known."""
    return layout.stream is None or not isinstance(layout.stream.index, UNKNOWN)


def _iterations(start: int, stop: int, step: int) -> int:
    return max(-(-(stop - start) // step), 0)


def _surely(loop: Instruction) -> int:
    """Return how many iterations a loop has by its bounds; 0 where they are no numbers."""
    start, stop, step = (loop.kwargs[k] for k in ("start", "stop", "step"))
    if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int) and step:
        return _iterations(start, stop, step)
    return 0
