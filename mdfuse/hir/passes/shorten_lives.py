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

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, dataflow, pinned, with_code
from mdfuse.hir.instructions import is_elementwise, is_library, is_local
from mdfuse.hir.passes.large_values import (
    has_large,
    is_large,
    nbytes,
)
from mdfuse.hir.program import HostProgram, Instruction

name = "shorten_lives"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with such work in other places, where launches are made."""
    if not has_large(program, options):
        return program
    lives = _Lives.of(program)
    lives.sink()
    lives.raise_elements()
    return with_code(program, lives.code)


@dataclass(eq=False)
class _Lives:
    """Instructions in their new order, and what is known of their operands.

    Attributes:
        program: whose instructions these are.
        flow: its dataflow.
        pinned: names that are in use whoever reads them, and their memory.
        code: the instructions.
        last: memory -> the instruction that uses it last, where this is known.
    """

    program: HostProgram
    flow: Dataflow
    pinned: frozenset[str]
    code: list[Instruction]
    last: dict[str, Instruction]

    @classmethod
    def of(cls, program: HostProgram) -> _Lives:
        flow, fixed = dataflow(program), pinned(program)
        every = fixed.union(map(flow.memory, fixed))
        return cls(program, flow, every, list(program.instructions), {})

    def last_use(self, memory: str) -> Instruction:
        """Return the instruction that uses memory last."""
        if memory not in self.last:
            self.last[memory] = self.flow.code[self.flow.last_use(memory)]
        return self.last[memory]

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
        return [x for x in read if x not in self.pinned and id(self.last_use(x)) in ends]

    def nbytes(self, names: Iterable[str]) -> int:
        return sum([nbytes(self.program, x) for x in names])

    def meet(self, i: Instruction, j: Instruction) -> bool:
        return self.flow.effects(i).meet(self.flow.effects(j))

    def sink(self) -> None:
        """Move products down to whoever reads them first."""
        for n in reversed(range(len(self.code))):
            i = self.code[n]
            behind = self.code[n + 1] if n + 1 < len(self.code) else i
            if not is_library(i) or not _is_passed_down(behind) or self.meet(i, behind):
                continue
            if self.is_new(i) and (passed := self.passed_down(n)):
                self.code[n : n + 1 + len(passed)] = [*passed, i]
                self.last.update(dict.fromkeys(self.dying(i, (i, *passed)), i))

    def passed_down(self, n: int) -> list[Instruction]:
        """Return those behind a product in front of which it goes; none: it would hold more."""
        i, passed, ends = self.code[n], list[Instruction](), Counter[int]()
        for x in {*map(self.flow.memory, i.reads)} - self.pinned:
            ends[id(self.last_use(x))] += self.nbytes([x])
        room = self.nbytes(i.outputs) - ends[id(i)]
        for at in range(n + 1, len(self.code)):
            j = self.code[at]
            if not _is_passed_down(j) or self.meet(i, j):
                break
            room -= ends[id(j)]
            if room <= 0:
                return []
            passed.append(j)
        return passed if room > 0 and any(map(is_library, passed)) else []

    def raise_elements(self) -> None:
        """Move what is computed element by element up to what makes an operand."""
        for n, i in enumerate(self.code):
            ahead = self.code[n - 1]
            if not n or not is_elementwise(i) or not _is_passed_up(ahead) or self.meet(i, ahead):
                continue
            if i.order is None and self.is_new(i) and (count := self.passed_up(n)):
                self.code[n - count : n + 1] = [i, *self.code[n - count : n]]

    def passed_up(self, n: int) -> int:
        """Return behind how many an instruction comes no longer; 0: it would save nothing."""
        i, at = self.code[n], n
        gone = {x: self.nbytes([x]) for x in self.dying(i, (i,))}
        room = sum(gone.values()) - self.nbytes(i.outputs)
        while room > 0 and at and _is_passed_up(j := self.code[at - 1]):
            if self.meet(i, j):
                break
            at -= 1
            used = map(self.flow.memory, self.flow.effects(j).reads)
            room -= sum([gone.pop(x, 0) for x in used])
        is_behind_elements = at > 0 and is_elementwise(self.code[at - 1])
        is_past_products = any(map(is_library, self.code[at:n]))
        return n - at if room > 0 and is_behind_elements and is_past_products else 0


def _is_passed_down(i: Instruction) -> bool:
    return i.op != "fetch" and (is_local(i) or i.op in ("alloc", "post"))  # the host waits there


def _is_passed_up(i: Instruction) -> bool:
    return is_local(i) or i.op in ("alloc", "post", "wait")
