"""Compute large values that follow from others at little cost in each unit that reads them.

    launch f(%g, %u, %t) -> %s, %dw {               launch f(%g, %u, %t) -> %dw {
      %s = silu(%g)                                   %s = silu(%g)
      %m = mul(%s, %u)                                %m = mul(%s, %u)
      %dw = matmul(%t, %m)                            %dw = matmul(%t, %m)
    }                                       ->      }
    launch h(%dm, %s, %g) -> %du, %dg {             launch h(%dm, %g) -> %du, %dg {
      %du = mul(%dm, %s)                              %s.again = silu(%g)
      ...                                             %du = mul(%dm, %s.again)
    }                                                 ...

Between the units %s is not in memory then. The operands must be there till then anyway, and those
that a unit does not read yet be no more bytes than the value. All large values of element-wise work
are computed so; of norms of rows, and of others in another order, the largest are.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, dataflow, pinned
from mdfuse.hir.instructions import is_elementwise, is_work, may_share
from mdfuse.hir.passes.large_values import NORMS, has_large, is_large, nbytes
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.ir.graph import fresh_name

name = "compute_in_units"

#: Bytes of the smallest value that is computed again where that is a pass over memory of its own.
ROWS = 256 << 20


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program whose units compute such values themselves."""
    if not has_large(program, options):
        return program
    flow = dataflow(program)
    units = _Units(program, flow, pinned(program), [*flow.code], dict(program.types))
    for n, i in enumerate(flow.code):
        for x in i.outputs if i.op == "launch" else ():
            units.move(n, x)
    if not units.changed:
        return program
    code = tuple(j for n, i in enumerate(units.code) for j in units.as_work(n, i))
    gone = units.gone()
    types = {x: kind for x, kind in units.types.items() if x not in gone}
    return replace(program, instructions=code, types=types)


@dataclass(eq=False)
class _Units:
    """The instructions, some of them changed, and what is known of names.

    Attributes:
        program: before the pass.
        flow: its dataflow.
        pinned: names that are in use whoever reads them.
        code: the instructions.
        types: of all names.
        changed: the positions of units that have others in their places.
    """

    program: HostProgram
    flow: Dataflow
    pinned: frozenset[str]
    code: list[Instruction]
    types: dict[str, BufferType]
    changed: set[int] = field(default_factory=set)

    def move(self, n: int, x: str) -> None:
        """Let the readers of a result of a unit compute it, if that takes no more memory."""
        if x in self.pinned or not self.flow.is_own(x) or not is_large(self.program, x):
            return
        readers = self.flow.readers(x)
        if not readers or any(self.code[r].op != "launch" for r in readers):
            return
        of_rows, others = nbytes(self.program, x) >= ROWS, {*self.code[n].outputs} - {x}
        chains = [_chain(self.code[n], x, of_rows, ends) for ends in (set[str](), others)]
        there = (chain for chain in chains if chain and self.are_there(chain, n, readers))
        chain = next(there, None)
        if chain is None or self.flow.results(x) != [n]:
            return
        self.changed.update((n, *readers))
        self.code[n] = _of_body(self.code[n], self.code[n].body, {x})
        for r in readers:
            names = dict[str, str]()
            for i in chain:
                names[i.outputs[0]] = fresh_name(self.types, f"{i.outputs[0]}.again")
                self.types[names[i.outputs[0]]] = self.types[i.outputs[0]]
            body = (*chain, *self.code[r].body)
            self.code[r] = _of_body(self.code[r], [i.renamed(names) for i in body])

    def as_work(self, n: int, i: Instruction) -> Sequence[Instruction]:
        """Return an instruction; for a unit that has become too short, those in it."""
        return (i,) if n not in self.changed or is_work(i.body) else i.body

    def gone(self) -> set[str]:
        """Return the names of which nothing is left."""
        old, new = (
            {x for n in self.changed for j in code[n].body for x in j.outputs}
            for code in (self.flow.code, self.code)
        )
        return {x for x in old - new if self.changed.issuperset(self.flow.uses.get(x, ()))}

    def are_there(self, chain: Sequence[Instruction], n: int, readers: Sequence[int]) -> bool:
        """Tell whether all readers have what a value is computed of, and read no more for it."""
        results = {x for i in chain for x in i.outputs}
        operands = dict.fromkeys(x for i in chain for x in i.reads if x not in results)
        last = max(readers)
        for x in operands:
            memory = self.flow.memory(x)
            places = [at for at, _ in self.flow.touches[memory]]
            is_alive = memory in self.pinned or self.flow.last_use(x) >= last
            first = n + (x in self.code[n].outputs)
            if not is_alive or any(self.writes(at, memory) for at in places if first <= at <= last):
                return False
        size, large = nbytes(self.program, chain[-1].outputs[0]), filter(self.is_large, operands)
        sizes = {x: nbytes(self.program, x) for x in large}
        return all(
            sum([sizes[x] for x in sizes if x not in self.code[r].reads]) <= size for r in readers
        )

    def is_large(self, x: str) -> bool:
        return is_large(self.program, x)

    def writes(self, at: int, memory: str) -> bool:
        return memory in self.flow.effects(self.flow.code[at]).writes


def _chain(unit: Instruction, x: str, of_rows: bool, ends: Set[str]) -> list[Instruction]:
    """Return what computes a result at little cost from operands of its unit; else nothing.

    Args:
        unit: whose result it is.
        x: the result.
        of_rows: whether norms and views are of little cost, not element-wise work alone.
        ends: other results of the unit, which are operands, too.
    """
    chain, needed = list[Instruction](), {x}
    for i in reversed(unit.body):
        if ends >= needed.intersection(i.outputs):
            continue
        is_cheap = is_elementwise(i) or (of_rows and (may_share(i) or i.fn in NORMS))
        is_plain = is_cheap and i.order is None and len(i.outputs) == 1 and i.reads
        if not is_plain or i.outputs[0] in unit.inputs:
            return []
        needed.update(i.reads)
        chain.append(i)
    results = {y for i in unit.body for y in i.outputs}
    computed = {y for i in chain for y in i.outputs}
    return chain[::-1] if needed & results <= computed | ends else []


def _of_body(
    unit: Instruction, body: Sequence[Instruction], gone: set[str] | None = None
) -> Instruction:
    """Return a unit with another body, and without some results."""
    outputs = tuple(x for x in unit.outputs if x not in (gone or ()))
    needed, live = set(outputs), list[Instruction]()
    for i in reversed(body):
        if not needed.isdisjoint(i.outputs):
            live.append(i)
            needed.update(i.reads)
    results, reads = set[str](), dict[str, None]()
    for i in reversed(live):
        reads |= dict.fromkeys(x for x in i.reads if x not in results)
        results.update(i.outputs)
    return replace(unit, inputs=tuple(reads), outputs=outputs, body=tuple(live[::-1]))
