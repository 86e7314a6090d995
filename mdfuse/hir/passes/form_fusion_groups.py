"""Group local work into host units that a compiler makes into few kernels.

    %a = cast(%x, dtype=f32)                        launch fused0(%x, %w) -> %n {
    %s = mul(%a, %a)                                  %a = cast(%x, dtype=f32)
    %m = mean(%s, dims=[-1])                ->        ...
    %n = ...                                          %n = ...
    %q = linear(%n, %wq)                              %q = linear(%n, %wq)
                                                    }

Work waits until something needs it, so that what belongs together joins. It goes before
communications and all else that is no local work, but for what is computed element by element for
work of that kind behind a post or a wait, of no more bytes than it makes: in one unit it is neither
written nor read. Sums over chunks are added up where their parts are made. What is written over a
value is in a unit where each element is computed from the one that lies there; whoever reads that
value otherwise goes in a unit before, since a compiler may make both into one kernel. A long unit
is cut, where layers repeat into equal ones, which are compiled once. Rows of a cache are written
in the unit that computes them; who reads the cache goes in another one. For matrix products and
attention a compiler calls the library that torch calls: they are in units for what is around them,
and none is made of them alone. A product that is summed over ranks gets a buffer of the program's,
which the sum may have then; one that lies in the memory of an output is in no unit. Nor is what
torch adds up in one order: a compiler adds rows of a table by atomic operations, whose order, and
so whose bits, are others in each run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mdfuse.config import Options
from mdfuse.errors import BACKWARD, RECOMPUTED
from mdfuse.hir.analysis.dataflow import Dataflow, Effects, dataflow, pinned
from mdfuse.hir.instructions import is_elementwise, is_library, is_local, is_work, op_of
from mdfuse.hir.passes.repeats import pieces
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.dims import Shape
from mdfuse.mesh import DeviceMesh

name = "form_fusion_groups"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with launches, where its local work is to be compiled."""
    if not is_grouped(options):
        return program
    return replace(program, instructions=_Groups.of(program).block(program.instructions))


def is_grouped(options: Options) -> bool:
    """Return whether programs get launches."""
    return options.compile == "always" or (options.compile == "auto" and torch.cuda.is_available())


@dataclass(eq=False)
class _Groups:
    """Local instructions that wait, in program order, and what is known of names.

    Attributes:
        program: whose instructions these are.
        flow: its dataflow.
        readers_of: who reads a name, once for each time.
        summed: names that are summed over ranks, whole.
        pinned: names that are in use whoever reads them: inputs, outputs, and what shares a buffer.
        filled: outputs of the program that are written more than once.
        bound: names that have a buffer so far.
        empty: those whose buffer has no value yet.
        given: names that were bound when a waiting instruction wrote them.
        waiting: the instructions.
        readers: memory -> how many of them read it.
        over: names whose elements lie where waiting instructions write over a value, or come from
            there -> their shape; None: rows of it are written.
        number: how many units there are.
    """

    program: HostProgram
    flow: Dataflow
    readers_of: Mapping[str, Sequence[Instruction]]
    summed: frozenset[str]
    pinned: frozenset[str]
    filled: frozenset[str]
    bound: set[str]
    empty: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    waiting: list[Instruction] = field(default_factory=list)
    readers: Counter[str] = field(default_factory=Counter)
    over: dict[str, Shape | None] = field(default_factory=dict)
    number: int = 0

    @classmethod
    def of(cls, program: HostProgram) -> _Groups:
        readers: dict[str, list[Instruction]] = defaultdict(list)
        for i in (i for i in program.walk() if i.op != "launch"):
            for x in i.reads:
                readers[x].append(i)
        posts = (i for i in program.walk() if i.comm is not None and i.comm.kind == "Allreduce")
        summed = frozenset(i.inputs[0] for i in posts if isinstance(i.inputs[0], str))
        writes = Counter(x for i in program.instructions for x in i.outputs)
        filled = frozenset(x for x in program.outputs if writes[x] > 1)
        flow = dataflow(program)
        return cls(program, flow, readers, summed, pinned(program), filled, set(program.inputs))

    def block(self, block: Sequence[Instruction]) -> tuple[Instruction, ...]:
        """Return a block with units; nothing waits beyond its end."""
        done: list[Instruction] = []
        flat = (leaf for i in block for leaf in (i.body if i.op == "launch" else (i,)))
        for i in flat:
            if self.can_wait(i):
                done += self.made_way(i)
                self.given.update(self.bound.intersection(i.outputs))
                self.waiting.append(i)
                self.readers.update(map(self.memory, i.reads))
            elif i.op == "alloc" and i.kwargs in ({}, {"memory": "symmetric"}):
                self.empty.update(set(i.outputs) - self.bound)
                done.append(i)
            elif i.op == "chunk" and i.reads[0] in self.empty:
                self.empty.update(i.outputs)  # an iteration writes its own, which nobody has read
                done.append(i)
            else:
                needed = self.needed(i) if is_local(i) else self.not_held(i)
                done += self.units(needed)
                done.append(self.nested(i))
            self.bound.update(i.outputs)
            if not self.empty.issuperset(i.outputs) or i.op not in ("alloc", "chunk"):
                self.empty.difference_update((*i.outputs, *i.reads))
        return (*done, *self.units(self.waiting))

    def nested(self, i: Instruction) -> Instruction:
        if not i.body and not i.orelse:
            return i
        return replace(i, body=self.block(i.body), orelse=self.block(i.orelse))

    def can_wait(self, i: Instruction) -> bool:
        """Tell whether an instruction is work on tensors for a compiler."""
        op = op_of(i)
        if i.op == "accumulate":
            return i.order is None and not self.bound.isdisjoint(i.outputs)
        if op is None or i.op != op.host or op.is_in_order:
            return False
        if is_library(i) and not self.filled.isdisjoint(i.outputs):
            return False  # in a unit it would be copied to where it is to lie
        if i.op == "set" and i.order is not None and i.reads[0] in self.program.inputs:
            return False  # what callers pass mostly lies so: alone it is no work then
        is_partial = i.op == "index_copy"
        if self.is_over(i) and not ((op.is_elementwise or is_partial) and self.is_in_place(i)):
            return False
        return all(self.mesh(x) is not None for x in (*i.reads, *i.outputs))

    def is_over(self, i: Instruction) -> bool:
        """Tell whether an instruction writes over a value."""
        names = (name for x in i.outputs for name in (x, self.program.root(x)))
        return any(name in self.bound and name not in self.empty for name in names)

    def is_in_place(self, i: Instruction) -> bool:
        """Tell whether an instruction reads what it writes over as it lies, if at all."""
        memory = self.memory(i.outputs[0])
        roots = {self.program.root(x) for x in i.reads if self.memory(x) == memory}
        return i.order is None and roots <= {memory}

    def made_way(self, i: Instruction) -> list[Instruction]:
        """Return the units that go first.

        That is work on another mesh, and what was computed before where something is computed
        again: in one unit a compiler would keep it till then. Readers of a value that is
        written over go first, too, but for the unit that writes it.
        """
        if self.is_over(i) and i.op == "index_copy":
            return self.alone(i)
        if not self.waiting:
            return []
        is_elsewhere = self.mesh(self.waiting[0].outputs[0]) != self.mesh(i.outputs[0])
        is_again = not self.is_beside(i) and not all(map(_is_recomputed, self.waiting))
        if is_elsewhere or is_again:
            return self.units(self.waiting)
        if self.is_over(i) or i.op == "accumulate":
            return self.untangled(i)
        return [] if self.follows(i) else self.units(self.waiting)

    def is_beside(self, i: Instruction) -> bool:
        """Tell whether an instruction repeats nothing that would be kept in one unit till then.

        It is computed for the first time, or in a loop over chunks right behind that; or it is
        element by element, of what the backward reads.
        """
        layout, op = self.program.types[i.outputs[0]].layout, op_of(i)
        if not _is_recomputed(i) or (layout is not None and layout.stream is not None):
            return True
        return op is not None and op.is_elementwise and all(map(_is_backward, self.waiting))

    def follows(self, i: Instruction) -> bool:
        """Tell whether an instruction reads what is written over element by element, if at all."""
        shapes: set[Shape | None] = set()
        for name in i.reads:
            root, memory = self.program.root(name), self.memory(name)
            if name in self.over or memory in self.over:
                is_as_it_lies = name in self.over or root == memory
                shapes.add(self.over.get(name, self.over.get(memory)) if is_as_it_lies else None)
        if not shapes:
            return True
        op, result = op_of(i), self.program.types[i.outputs[0]].shape
        if op is None or not op.is_elementwise or i.order is not None or shapes != {result}:
            return False
        self.over.update(dict.fromkeys(i.outputs, result))
        return True

    def alone(self, i: Instruction) -> list[Instruction]:
        """Return the units that go before a write of rows, such as who reads what it writes."""
        memory = self.memory(i.outputs[0])
        is_after = self.readers[memory] or any(
            x in self.over or self.memory(x) in self.over for x in i.reads
        )
        meshes = {self.mesh(j.outputs[0]) for j in self.waiting[:1]} | {self.mesh(i.outputs[0])}
        done = self.units(self.waiting) if is_after or len(meshes) > 1 else []
        self.over.update({memory: None, i.outputs[0]: None})
        return done

    def untangled(self, i: Instruction) -> list[Instruction]:
        """Return the units of whoever reads what an instruction writes over in other places."""
        memory, shape = self.memory(i.outputs[0]), self.program.types[i.outputs[0]].shape
        self.over[memory] = shape
        left, first = self.readers[memory], len(self.waiting)
        while left:
            first -= 1
            left -= sum(self.memory(x) == memory for x in self.waiting[first].reads)
        tangled = [j for j in self.waiting[first:] if not self.follows(j)]
        leading = self.led_to(i, shape) if tangled else set()
        done = self.units([j for j in self.waiting if id(j) not in leading] if tangled else ())
        if not self.follows(i):
            done += self.units(self.waiting)
        self.over.update({memory: shape, i.outputs[0]: shape})
        return done

    def led_to(self, i: Instruction, shape: Shape) -> set[int]:
        """Return the ids of what computes an update element by element, and is for nothing else."""
        names, led = set(i.reads), set[int]()
        others = Effects()
        for j in reversed(self.waiting):
            op, is_alike = op_of(j), self.program.types[j.outputs[0]].shape in (shape, ())
            is_free = not others.meet(self.flow.effects(j))
            if is_free and is_alike and op and op.is_elementwise and names & {*j.outputs}:
                led.add(id(j))
                names.update(j.reads)
            else:
                others |= self.flow.effects(j)
        return led

    def mesh(self, name: str) -> DeviceMesh | None:
        kind = self.program.types.get(name)
        return kind.layout.mesh if kind is not None and kind.layout is not None else None

    # -- who needs whom ------------------------------------------------------------------------

    def needed(self, i: Instruction) -> list[Instruction]:
        """Return the waiting instructions up to the last one that must run before another.

        Earlier ones go with it, though they may wait: what they read, such as the gradient from
        which that of a parameter is computed, would be in memory till then.
        """
        later, count = self.flow.effects(i), len(self.waiting)
        while count and not later.meet(self.flow.effects(self.waiting[count - 1])):
            count -= 1
        return self.waiting[:count]

    def not_held(self, i: Instruction) -> list[Instruction]:
        """Return the waiting instructions that must run before one that is no local work."""
        held = self.held(i) if i.op in ("post", "wait") else {}
        results = {x for j in held.values() for x in j.outputs}
        taken = {x for j in held.values() for x in j.reads} - results
        needed = {x for x in results if any(id(j) not in held for j in self.readers_of[x])}
        if sum(map(self.nbytes, taken)) > sum(map(self.nbytes, needed)):
            held = {}  # to compute it late would read more than to read what it makes
        return [j for j in self.waiting if id(j) not in held]

    def held(self, i: Instruction) -> dict[int, Instruction]:
        """Return, by id, what a post or a wait need not wait for, and may join what is behind."""
        later, waiting = self.flow.effects(i), set(map(id, self.waiting))
        held: dict[int, Instruction] = {}
        for j in reversed(self.waiting):
            readers = [k for x in j.outputs for k in self.readers_of.get(x, ())]
            others = (k for k in readers if id(k) not in held)
            is_led = all(id(k) not in waiting and is_elementwise(k) for k in others)
            is_own = self.pinned.isdisjoint(j.outputs) and self.given.isdisjoint(j.outputs)
            is_free = readers and is_led and is_own and not later.meet(self.flow.effects(j))
            if is_free and is_elementwise(j):
                held[id(j)] = j
            else:
                later |= self.flow.effects(j)
        return held

    def nbytes(self, name: str) -> int:
        return self.program.types[name].nbytes()

    def memory(self, name: str) -> str:
        return self.flow.memory(name)

    # -- units -----------------------------------------------------------------------------------

    def units(self, chosen: Iterable[Instruction]) -> list[Instruction]:
        """Take instructions from those that wait; return units of them, or them as they are."""
        taken = list(chosen)
        if not taken:
            return []
        ids = set(map(id, taken))
        self.waiting = [i for i in self.waiting if id(i) not in ids]
        self.readers.subtract(self.memory(x) for i in taken for x in i.reads)
        if not self.waiting:
            self.over.clear()
        return [unit for piece in pieces(self.program, taken) for unit in self.unit(piece)]

    def unit(self, taken: Sequence[Instruction]) -> Sequence[Instruction]:
        if not is_work(taken):
            return taken
        inner = Counter(x for i in taken for x in i.reads)
        results: dict[str, None] = {}
        inputs: dict[str, None] = {}
        for i in taken:
            inputs |= dict.fromkeys(x for x in i.reads if x not in results)
            results |= dict.fromkeys(i.outputs)
        outputs = tuple(
            x
            for x in results
            if x in self.pinned or x in self.given or len(self.readers_of.get(x, ())) > inner[x]
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
        return [*self.buffers(taken), unit]

    def buffers(self, taken: Sequence[Instruction]) -> Iterator[Instruction]:
        """Yield what allocates buffers for the products of a unit that are summed over ranks."""
        for i in filter(is_library, taken):
            x = i.outputs[0]
            is_new = self.memory(x) == x and x not in self.given | self.pinned
            if x in self.summed and is_new and len(i.outputs) == 1:
                yield Instruction(op="alloc", outputs=(x,), order=i.order, source=i.source)


def _is_backward(i: Instruction) -> bool:
    return i.source is not None and i.source.note in (BACKWARD, RECOMPUTED)


def _is_recomputed(i: Instruction) -> bool:
    return i.source is not None and i.source.note == RECOMPUTED
