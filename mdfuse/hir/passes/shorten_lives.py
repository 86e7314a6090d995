"""Move work past products, so that large values live shorter.

    %dm = matmul(%dy, %w)                           %dw = matmul(%dy_t, %m)
    %dw = matmul(%dy_t, %m)                         %c = post allreduce[sum](%dw) -> %dw.whole
    %c = post allreduce[sum](%dw) -> %dw.whole      %dm = matmul(%dy, %w)
    %ds = mul(%dm, %u)                      ->      %ds = mul(%dm, %u)
    %dx = matmul(%dt, %v)                           %dg = silu_grad(%ds, %g)
    %dg = silu_grad(%ds, %g)                        %dx = matmul(%dt, %v)

A large product whose operands are in memory anyway is computed right before it is read: what other
products read is gone by then. What is computed element by element, and is smaller than the operands
that die there, comes right behind the work of its kind that makes one of them. No product is moved
past a wait, behind which it would hide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, dataflow, pinned
from mdfuse.hir.instructions import is_elementwise, is_library, is_local
from mdfuse.hir.passes.large_values import has_numbers, has_units_in_order, is_large
from mdfuse.hir.program import HostProgram, Instruction

name = "shorten_lives"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with such work in other places, where launches are made."""
    if not has_units_in_order(program, options) or not has_numbers(program):
        return program
    lives = _Lives.of(program)
    lives.sink()
    lives.raise_elements()
    return replace(program, instructions=tuple(lives.code))


@dataclass(eq=False)
class _Lives:
    """Instructions in their new order, and what is known of their operands.

    Attributes:
        program: whose instructions these are.
        flow: its dataflow.
        pinned: names that are in use whoever reads them.
        code: the instructions.
        last: memory -> the instruction that uses it last.
    """

    program: HostProgram
    flow: Dataflow
    pinned: frozenset[str]
    code: list[Instruction]
    last: dict[str, Instruction]

    @classmethod
    def of(cls, program: HostProgram) -> _Lives:
        flow, code = dataflow(program), list(program.instructions)
        last = {x: i for i in code for x in cls.used(flow, i)}
        return cls(program, flow, pinned(program), code, last)

    @staticmethod
    def used(flow: Dataflow, i: Instruction) -> Iterable[str]:
        effects = flow.effects(i)
        return map(flow.memory, (*effects.reads, *effects.writes))

    def is_new(self, i: Instruction) -> bool:
        """Tell whether an instruction makes one large value in memory of its own."""
        if len(i.outputs) != 1 or i.outputs[0] in self.pinned or not is_local(i):
            return False
        (x,) = i.outputs
        is_alone = self.flow.is_own(x) and len(self.flow.results(x)) == 1
        return is_alone and is_large(self.program, x)

    def dying(self, i: Instruction, among: Iterable[Instruction]) -> list[str]:
        """Return the memory of operands of an instruction that some are the last to use."""
        ends, read = set(map(id, among)), dict.fromkeys(map(self.flow.memory, i.reads))
        fixed = set(map(self.flow.memory, self.pinned))
        return [x for x in read if x not in fixed and id(self.last[x]) in ends]

    def nbytes(self, names: Iterable[str]) -> int:
        return sum(self.program.types[x].nbytes() for x in names)

    def sink(self) -> None:
        """Move products down to whoever reads them first."""
        for n in reversed(range(len(self.code))):
            i = self.code[n]
            if not is_library(i) or not self.is_new(i):
                continue
            effects, end = self.flow.effects(i), n + 1
            while end < len(self.code) and _is_passed_down(j := self.code[end]):
                if effects.meet(self.flow.effects(j)):
                    break
                end += 1
            passed = self.code[n + 1 : end]
            longer = self.dying(i, (i, *passed))
            if any(map(is_library, passed)) and self.nbytes(longer) < self.nbytes(i.outputs):
                self.code[n:end] = [*passed, i]
                self.last.update(dict.fromkeys(longer, i))

    def raise_elements(self) -> None:
        """Move what is computed element by element up to what makes an operand."""
        for n, i in enumerate(self.code):
            if not is_elementwise(i) or i.order is not None or not self.is_new(i):
                continue
            gone = self.dying(i, (i,))
            if self.nbytes(gone) <= self.nbytes(i.outputs):
                continue
            effects, at = self.flow.effects(i), n
            while at and _is_passed_up(j := self.code[at - 1]):
                if effects.meet(self.flow.effects(j)):
                    break
                at -= 1
            passed = self.code[at:n]
            used = {x for j in passed for x in self.used(self.flow, j)}
            shorter = [x for x in gone if x not in used]
            is_behind_elements = at > 0 and is_elementwise(self.code[at - 1])
            is_less = self.nbytes(shorter) > self.nbytes(i.outputs)
            if is_behind_elements and is_less and any(map(is_library, passed)):
                self.code[at : n + 1] = [i, *passed]


def _is_passed_down(i: Instruction) -> bool:
    return is_local(i) or i.op in ("alloc", "post")


def _is_passed_up(i: Instruction) -> bool:
    return is_local(i) or i.op in ("alloc", "post", "wait")
