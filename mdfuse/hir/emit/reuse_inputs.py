"""Write outputs that reuse an input into the input's buffer, after all reads of the old value.

    %y: f32[4] (tp=R) = add(%x, 1.0)                alias %y: f32[4] (tp=R) = %x
    return %y                              ->       %x = add(%x, 1.0)
                                                    return %y

This needs an old value that is not read later, and an instruction that reads it element by element
or updates a part of it (`%x = index_copy(%at, %rows, %x)`). Otherwise the result is computed
elsewhere and copied after the last read:

    %y: f32[4] (tp=R) = add(%x, 1.0)                alias %y: f32[4] (tp=R) = %x
    %z: f32[4] (tp=R) = mul(%x, 2.0)                %y.new: f32[4] (tp=R) = add(%x, 1.0)
    return %y, %z                          ->       %z: f32[4] (tp=R) = mul(%x, 2.0)
                                                    %y = set(%y.new)
                                                    return %y, %z

An iteration of a loop over chunks writes its chunk into the input, if it reads no other chunk of
the old value, and if nothing reads the old value behind the loop:

    %y: f32[4] (tp=R) = alloc                       alias %y: f32[4] (tp=R) = %x
    for %i in 0..2 {                                for %i in 0..2 {
      %x.i: … = chunk(%x)                             %x.i: … = chunk(%x)
      %y.i: … = chunk(%y)                  ->         %x.i = add(%x.i, 1.0)
      %y.i = add(%x.i, 1.0)                         }
    }                                               return %y
    return %y
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mdfuse.hir.analysis.dataflow import storage
from mdfuse.hir.emit.sets import copy_into
from mdfuse.hir.instructions import BLOCKS, received
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.ir.graph import fresh_name
from mdfuse.ir.ops import TABLE

#: Instructions that hold others.
_BLOCKS = ("launch", *BLOCKS)

#: The instructions that take the place of one.
Instead = tuple[Instruction, ...]


def run(
    program: HostProgram, reuse: Mapping[str, str], orders: Mapping[str, tuple[int, ...]]
) -> HostProgram:
    """Return the program with an alias and a write for each output that reuses an input.

    Args:
        program: a program in which each output is a buffer of its own.
        reuse: output -> the input into whose buffer it is written.
        orders: output -> the memory order that it requires, and so its buffer.
    """
    if not reuse:
        return program
    types, code = dict(program.types), _Code(program.instructions[:-1])
    shared = dict(storage(program))
    for i in program.walk():  # a post reads until its wait
        if i.op in ("post", "send"):
            shared[i.outputs[0]] = shared.get(i.reads[0], i.reads[0])
    overwritten = {*reuse.values()}
    for output in program.outputs:
        if output not in program.inputs and shared.get(output) in overwritten:
            code.copy(output, types[output])
            shared[output] = output
    sharing: dict[str, set[str]] = {}
    for name, of in shared.items():
        sharing.setdefault(of, set()).add(name)
    for output in program.outputs:
        if output in reuse:
            code.write(output, reuse[output], shared, sharing.get(reuse[output], set()), types)
    return replace(
        program,
        types=types,
        instructions=(*code.instructions, program.instructions[-1]),
        aliases={**program.aliases, **reuse},
        alias_orders={n: order for n, order in orders.items() if n in reuse},
    )


class _Code:
    """The instructions in places, indexed by name, so that an output looks at few of them.

    A step of training has thousands of instructions and hundreds of outputs.
    """

    def __init__(self, code: Iterable[Instruction]) -> None:
        self._slots: list[Instead] = []
        self._places: dict[str, set[int]] = {}
        #: block -> the place of its last call, after which nothing uses its names
        self._called: dict[str, int] = {}
        for place, i in enumerate(code):
            self._slots.append((i,))
            if i.op == "call":
                self._called[i.fn] = place
            for j in i.walk():
                self._note((*j.reads, *j.outputs), (place,))

    @property
    def instructions(self) -> Iterator[Instruction]:
        """All instructions, in order."""
        return chain.from_iterable(self._slots)

    def copy(self, output: str, kind: BufferType) -> None:
        """Turn a view of an input that is overwritten into a copy."""
        for place in self._where((output,)):
            self._slots[place] = tuple(_copied(i, output, kind) for i in self._slots[place])

    def write(
        self,
        output: str,
        buffer: str,
        shared: Mapping[str, str],
        same_memory: Collection[str],
        types: dict[str, BufferType],
    ) -> None:
        """Write an output into the buffer of an input; `same_memory`: other names of the buffer."""
        chunks = frozenset(_chunks(self._at(self._where((output,))), output))
        write = _Write(output, buffer, shared, chunks)
        names = {output, buffer, *chunks, *same_memory}
        posts = (j for i in self._at(self._where(names)) for j in i.walk() if write.receives(j))
        places = self._where(names.union(*(j.outputs for j in posts)))
        ends = {self._called[i.fn] for i in self._at(places) if i.fn in self._called}
        places = sorted(ends.union(places))
        written = iter(write.into([*self._at(places)], types))
        for place in places:
            self._slots[place] = (*chain.from_iterable(next(written) for _ in self._slots[place]),)
        self._note((buffer,), places)

    def _where(self, names: Iterable[str]) -> list[int]:
        return sorted({place for name in names for place in self._places.get(name, ())})

    def _at(self, places: Iterable[int]) -> Iterator[Instruction]:
        return (i for place in places for i in self._slots[place])

    def _note(self, names: Iterable[str], places: Collection[int]) -> None:
        for name in names:
            self._places.setdefault(name, set()).update(places)


def _copied(i: Instruction, output: str, kind: BufferType) -> Instruction:
    """Turn a view of an input that is overwritten into a copy: a required order copies."""
    if i.op in _BLOCKS:
        return replace(i, body=tuple(_copied(j, output, kind) for j in i.body))
    if output not in i.outputs or i.order is not None:
        return i
    return replace(i, order=tuple(range(len(kind.shape))))


@dataclass(frozen=True)
class _Write:
    """An output that is to be written into the buffer of an input.

    Attributes:
        output: the name of the output.
        buffer: the name of the input.
        shared: name -> the name whose memory it may share.
        chunks: the names of the output's chunks, in loops that write or read them.
    """

    output: str
    buffer: str
    shared: Mapping[str, str]
    chunks: frozenset[str]

    def into(self, code: list[Instruction], types: dict[str, BufferType]) -> list[Instead]:
        """Return the changed code: it writes in place, in a loop, or behind all reads.

        Args:
            code: the instructions with a name of the output, of the input or of its memory.
            types: the types of all names; names are added and removed.
        """
        if self.is_in_place(code, {self.buffer}):
            return [(self.unordered(i).renamed({self.output: self.buffer}),) for i in code]
        in_loop = self.in_place_loop(code, types)
        if in_loop is not None:
            return [tuple(i.renamed({self.output: self.buffer}) for i in row) for row in in_loop]
        return self.written_behind(code, types)

    def written_behind(
        self, code: list[Instruction], types: dict[str, BufferType]
    ) -> list[Instead]:
        """Return the code with the output computed elsewhere, and copied after the last read."""
        new = fresh_name(types, f"{self.output}.new")
        types[new] = types[self.output]
        posts = {x for i in code for j in i.walk() if self.receives(j) for x in j.outputs}
        uses = [self.makes(i) or self.reads_old(i.walk()) or _waits(i, posts) for i in code]
        blocks = {i.fn for i, is_use in zip(code, uses, strict=True) if is_use and i.op == "block"}
        calls = [i.op == "call" and i.fn in blocks for i in code]
        last = max(n for n in range(len(code)) if uses[n] or calls[n])
        source = next((i.source for i in code if self.makes(i)), None)
        changed: list[Instead] = [(i.renamed({self.output: new}),) for i in code]
        changed[last] += (copy_into(new, self.output, source),)
        return changed

    def makes(self, i: Instruction) -> bool:
        """Return whether an instruction, or one inside it, binds or writes the output."""
        if not (i.body or i.orelse):
            return self.writes(i)
        return any(self.writes(j) for j in i.walk())

    def writes(self, i: Instruction) -> bool:
        """Return whether an instruction binds the output, or writes into it or a chunk of it."""
        is_result = self.output in i.outputs or not self.chunks.isdisjoint(i.outputs)
        return (is_result and not _cuts(i, self.output)) or self.receives(i)

    def receives(self, i: Instruction) -> bool:
        """Return whether an instruction receives the output, or a chunk of it."""
        return any(x == self.output or x in self.chunks for x in received(i))

    def reads_old(self, code: Iterable[Instruction]) -> bool:
        """Return whether some of these instructions read the old value of the input."""
        return any(self.is_old(x) for i in code for x in i.reads)

    def is_old(self, name: str) -> bool:
        return self.shared.get(name, name) == self.buffer

    def is_in_place(self, block: Sequence[Instruction], names: Collection[str]) -> bool:
        """Return whether one instruction of a block makes the output and may write into the input.

        Args:
            block: the code, or an iteration of a loop.
            names: the names under which the block has the same elements of the input.
        """
        makers = [n for n, i in enumerate(block) if self.makes(i)]
        if len(makers) != 1 or block[makers[0]].op in BLOCKS:
            return False
        (at,) = makers
        inner = block[at].body if block[at].op == "launch" else (block[at],)
        place = next(n for n, i in enumerate(inner) if self.writes(i))
        return self.may_write(inner[place], names) and not (
            self.reads_old(inner[place + 1 :])
            or self.reads_old(j for i in block[at + 1 :] for j in i.walk())
        )

    def may_write(self, i: Instruction, names: Collection[str]) -> bool:
        """Return whether an instruction may overwrite the old value.

        It may if it does not read the old value, or reads each element before it writes the
        element.
        """
        if i.op in ("alloc", "post", "recv"):
            return False
        old = {x for x in i.reads if self.is_old(x)}
        return not old or (
            old.issubset(names) and i.fn in TABLE and TABLE[i.fn].updates(i.inputs, old)
        )

    def in_place_loop(
        self, code: Sequence[Instruction], types: dict[str, BufferType]
    ) -> list[Instead] | None:
        """Return the code with a loop that writes into chunks of the input; None: it may not."""
        makers = [n for n, i in enumerate(code) if self.makes(i)]
        if [code[n].op for n in makers] != ["alloc", "for"]:
            return None
        buffer, at = makers
        body, behind = code[at].body, code[at + 1 :]
        chunk = next((j.outputs[0] for j in body if _cuts(j, self.output)), None)
        if chunk is None or self.reads_old(j for i in behind for j in i.walk()):
            return None
        cut = (j.outputs[0] for j in body if _cuts(j, self.buffer))
        chunks = [name for name in cut if types[name] == types[chunk]]
        if not self.is_in_place(body, chunks) or self.reads_elsewhere(body, chunks):
            return None
        if chunks:  # output and input chunk are one memory: one name is enough
            del types[chunk]
            body_without_chunk = (j for j in body if not _cuts(j, self.output))
            body = tuple(j.renamed({chunk: chunks[0]}) for j in body_without_chunk)
        instead: dict[int, Instead] = {buffer: (), at: (replace(code[at], body=body),)}
        return [instead.get(n, (i,)) for n, i in enumerate(code)]

    def reads_elsewhere(self, body: Iterable[Instruction], chunks: Collection[str]) -> bool:
        """Return whether an iteration reads the old value outside of its own chunk."""
        known = set(chunks)
        for i in (j for outer in body for j in outer.walk()):
            is_chunk = _cuts(i, self.buffer) and i.outputs[0] in chunks
            if not is_chunk and any(self.is_old(x) and x not in known for x in i.reads):
                return True
            known.update(i.outputs)
        return False

    def unordered(self, i: Instruction) -> Instruction:
        """Drop the required order of the output, which has the order of the input."""
        if i.op == "launch":
            return replace(i, body=tuple(map(self.unordered, i.body)))
        return replace(i, order=None) if self.output in i.outputs else i


def _chunks(code: Iterable[Instruction], name: str) -> Iterator[str]:
    """Yield the names of the chunks of a value, which loops cut."""
    for i in code:
        if i.op in _BLOCKS or _cuts(i, name):
            yield from (j.outputs[0] for j in i.walk() if _cuts(j, name))


def _cuts(i: Instruction, name: str) -> bool:
    return i.op == "chunk" and i.reads == (name,)


def _waits(i: Instruction, handles: set[str]) -> bool:
    return any(j.op == "wait" and j.reads[0] in handles for j in i.walk())
