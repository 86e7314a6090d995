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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mdfuse.hir.analysis.dataflow import Dataflow, dataflow
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
    flow, types = dataflow(program), dict(program.types)
    code: list[Instead] = [(i,) for i in program.instructions[:-1]]
    calls = {i.fn: n for n, i in enumerate(program.instructions) if i.op == "call"}
    overwritten = {*reuse.values()}
    views = [
        x for x in program.outputs if x not in program.inputs and flow.memory(x) in overwritten
    ]
    for x in views:
        for n in flow.uses[x][:-1]:
            code[n] = tuple(_copied(i, x, types[x]) for i in code[n])
    flow = replace(flow, memories={**flow.memories, **{x: x for x in views}}, _effects={})
    for output in program.outputs:
        if output in reuse:
            write = _Write(output, reuse[output], flow, _chunks(code, flow, output))
            write.change(code, types, calls)
    return replace(
        program,
        types=types,
        instructions=(*chain.from_iterable(code), program.instructions[-1]),
        aliases={**program.aliases, **reuse},
        alias_orders={n: order for n, order in orders.items() if n in reuse},
    )


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
        flow: of the program without writes into inputs; an output that would be a view of an
            overwritten input has memory of its own.
        chunks: the names of the output's chunks, in loops that write or read them.
    """

    output: str
    buffer: str
    flow: Dataflow
    chunks: frozenset[str]

    def change(
        self, code: list[Instead], types: dict[str, BufferType], calls: Mapping[str, int]
    ) -> None:
        """Write the output into the input, in the instructions that use one of them.

        Args:
            code: for each position the instructions that stand there now.
            types: the types of all names; names are added and removed.
            calls: block -> the position of its last call, behind which nothing uses its names.
        """
        names = (self.output, self.buffer, *self.chunks)
        places = {n for x in names for n in self.flow.used_at.get(x, ()) if n < len(code)}
        places |= {calls[i.fn] for n in places for i in code[n] if i.fn in calls}
        ordered = sorted(places)
        written = iter(self.into([i for n in ordered for i in code[n]], types))
        for n in ordered:
            code[n] = (*chain.from_iterable(next(written) for _ in code[n]),)

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
        uses = [self.makes(i) or self.reads_old((i,)) for i in code]
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
        """Return whether an instruction receives the output, or a chunk of it, or waits for it."""
        post = self.flow.posts.get(i.reads[0], i) if i.op == "wait" else i
        return any(x == self.output or x in self.chunks for x in received(post))

    def reads_old(self, code: Iterable[Instruction]) -> bool:
        """Return whether some of these instructions read the old value of the input."""
        return any(self.buffer in self.flow.effects(i).reads for i in code)

    def is_old(self, name: str) -> bool:
        return self.flow.memory(name) == self.buffer

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
            self.reads_old(inner[place + 1 :]) or self.reads_old(block[at + 1 :])
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
        if chunk is None or self.reads_old(behind):
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


def _chunks(code: Sequence[Instead], flow: Dataflow, name: str) -> frozenset[str]:
    """Return the names of the chunks of a value, which loops cut."""
    users = (i for n in flow.uses[name][:-1] for i in code[n])
    cutting = (j for i in users if i.op in _BLOCKS or _cuts(i, name) for j in i.walk())
    return frozenset(j.outputs[0] for j in cutting if _cuts(j, name))


def _cuts(i: Instruction, name: str) -> bool:
    return i.op == "chunk" and i.reads == (name,)
