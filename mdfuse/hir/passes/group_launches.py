"""Group local work into host units that a compiler makes into few kernels.

    %a = cast(%x, dtype=f32)                        launch fused0(%x, %w) -> %n {
    %s = mul(%a, %a)                                  %a = cast(%x, dtype=f32)
    %m = mean(%s, dims=[-1])                ->        ...
    %n = ...                                          %n = ...
    %q = linear(%n, %wq)                              %q = linear(%n, %wq)
                                                    }

Work waits until something needs it, so that what belongs together joins. It goes before
communications and all else that is no local work. What is written over a value stays outside:
kernels in one unit may run at once. A long unit is cut, where layers repeat into equal ones, which
are compiled once. For matrix products and attention a compiler calls the library that torch calls:
they are in units for what is around them, and none is made of them alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from mdfuse.config import Options
from mdfuse.errors import RECOMPUTED
from mdfuse.hir.instructions import is_library, is_local, op_of, row_of
from mdfuse.hir.passes.repeats import pieces
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.storage import shared_operand, storage
from mdfuse.mesh import DeviceMesh

name = "group_launches"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with launches, where its local work is to be compiled."""
    if options.compile == "never":
        return program
    if options.compile == "auto" and not torch.cuda.is_available():
        return program
    return replace(program, instructions=_Groups.of(program).block(program.instructions))


@dataclass(eq=False)
class _Groups:
    """Local instructions that wait, in program order, and what is known of names.

    Attributes:
        program: whose instructions these are.
        shared: name -> the name whose memory it may share.
        reads: how often each name is read.
        kept: names that are in use whoever reads them: inputs, outputs, and what shares a buffer.
        bound: names that have a buffer so far.
        empty: those whose buffer has no value yet.
        given: names that were bound when a waiting instruction wrote them.
        waiting: the instructions.
        number: how many units there are.
    """

    program: HostProgram
    shared: dict[str, str]
    reads: Counter[str]
    kept: frozenset[str]
    bound: set[str]
    empty: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    waiting: list[Instruction] = field(default_factory=list)
    number: int = 0

    @classmethod
    def of(cls, program: HostProgram) -> _Groups:
        aliases = {*program.aliases, *map(program.root, program.aliases)}
        kept = frozenset({*program.inputs, *program.outputs, *aliases})
        found = (i for i in program.walk() if i.op != "launch")
        reads = Counter(x for i in found for x in i.reads)
        return cls(program, storage(program), reads, kept, set(program.inputs))

    def block(self, block: Sequence[Instruction]) -> tuple[Instruction, ...]:
        """Return a block with units; nothing waits beyond its end."""
        done: list[Instruction] = []
        flat = (leaf for i in block for leaf in (i.body if i.op == "launch" else (i,)))
        for i in flat:
            if self.can_wait(i):
                done += self.made_way(i)
                self.given.update(self.bound.intersection(i.outputs))
                self.waiting.append(i)
            elif i.op == "alloc" and not i.kwargs:
                self.empty.update(set(i.outputs) - self.bound)
                done.append(i)
            else:
                needed = self.needed(i) if is_local(i) else list(self.waiting)
                done += self.units(needed)
                done.append(self.nested(i))
            self.bound.update(i.outputs)
            if i.op != "alloc":
                self.empty.difference_update((*i.outputs, *i.reads))
        return (*done, *self.units(self.waiting))

    def nested(self, i: Instruction) -> Instruction:
        if not i.body and not i.orelse:
            return i
        return replace(i, body=self.block(i.body), orelse=self.block(i.orelse))

    def can_wait(self, i: Instruction) -> bool:
        """Tell whether an instruction is work on tensors for a compiler."""
        op = op_of(i)
        if op is None or i.op != op.host:
            return False
        if any({x, self.program.root(x)} & self.bound - self.empty for x in i.outputs):
            return False
        return all(self.mesh(x) is not None for x in (*i.reads, *i.outputs))

    def made_way(self, i: Instruction) -> list[Instruction]:
        """Return the units that go first: work on another mesh, or what is computed again.

        In one unit a compiler would take what was computed before, and keep it till then.
        """
        if not self.waiting:
            return []
        is_elsewhere = self.mesh(self.waiting[0].outputs[0]) != self.mesh(i.outputs[0])
        is_again = _is_recomputed(i) and not all(map(_is_recomputed, self.waiting))
        return self.units(self.waiting) if is_elsewhere or is_again else []

    def mesh(self, name: str) -> DeviceMesh | None:
        kind = self.program.types.get(name)
        return kind.layout.mesh if kind is not None and kind.layout is not None else None

    # -- who needs whom ------------------------------------------------------------------------

    def needed(self, i: Instruction) -> list[Instruction]:
        """Return the waiting instructions that must run before another, in order."""
        read, written = self.touched(i)
        found: list[Instruction] = []
        for j in reversed(self.waiting):
            own_read, own_written = self.touched(j)
            if own_written & (read | written) or own_read & written:
                found.append(j)
                read, written = read | own_read, written | own_written
        return found[::-1]

    def touched(self, i: Instruction) -> tuple[set[str], set[str]]:
        """Return the names and the memory that an instruction reads, and those it writes."""
        read = {x for name in i.reads for x in (name, self.memory(name))}
        written = set(i.outputs)
        has_buffer = not self.bound.isdisjoint({*written, *map(self.program.root, written)})
        if shared_operand(i) is None or i.order is not None or has_buffer:
            written |= {self.memory(name) for name in i.outputs}
        return read, written

    def memory(self, name: str) -> str:
        root = self.program.root(name)
        return self.shared.get(root, root)

    # -- units -----------------------------------------------------------------------------------

    def units(self, chosen: Iterable[Instruction]) -> list[Instruction]:
        """Take instructions from those that wait; return units of them, or them as they are."""
        taken = list(chosen)
        ids = set(map(id, taken))
        self.waiting = [i for i in self.waiting if id(i) not in ids]
        return [unit for piece in pieces(self.program, taken) for unit in self.unit(piece)]

    def unit(self, taken: Sequence[Instruction]) -> Sequence[Instruction]:
        works = [i for i in taken if _works(i)]
        if len(works) < 2 or all(is_library(i) for i in works):
            return taken
        inner = Counter(x for i in taken for x in i.reads)
        made: dict[str, None] = {}
        inputs: dict[str, None] = {}
        for i in taken:
            inputs |= dict.fromkeys(x for x in i.reads if x not in made)
            made |= dict.fromkeys(i.outputs)
        outputs = tuple(
            x for x in made if x in self.kept or x in self.given or self.reads[x] > inner[x]
        )
        if not outputs:  # nobody reads what it makes
            return taken
        unit = Instruction(
            op="launch",
            fn=f"fused{self.number}",
            inputs=tuple(inputs),
            outputs=outputs,
            body=tuple(taken),
            source=taken[0].source,
        )
        self.number += 1
        return [unit]


def _is_recomputed(i: Instruction) -> bool:
    return i.source is not None and i.source.note == RECOMPUTED


def _works(i: Instruction) -> bool:
    """Tell whether an instruction may put work on the device."""
    row = row_of(i)
    return i.order is not None or row is None or not row.is_pure_view
