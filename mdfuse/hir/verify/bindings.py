"""Check that one rank can run its projection at all, which plans rely on even without `verify`.

Every name that is read has a value, every wait a post, every stream a number. Other modules check
types, the order of accesses, and the posts of other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mdfuse.hir.once import once
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.accesses import Storage, View
from mdfuse.hir.verify.flow import Flow, Steps
from mdfuse.hir.verify.structure import check_structure
from mdfuse.ir.graph import Operand


@once
def check_bindings(program: HostProgram) -> None:
    """Raise ProgramError where a projection cannot be run on its rank.

    Args:
        program: the projection of one rank; its loops are written out here.
    """
    check_structure(program, allocates_once=False)
    Bindings(written_out(program)).run()


@dataclass
class Bindings(Flow):
    """A `Flow` that checks bindings and posts only, and leaves types, contents and order alone."""

    @property
    def steps(self) -> Steps:
        return {**super().steps, "post": Bindings.post, "return": Bindings.end}

    def read(self, name: str, i: Instruction) -> View | None:
        return self.view(name, i)

    def write(self, name: str, i: Instruction) -> None:
        if self.program.types[name].layout is None:
            self.numbers.add(name)
        elif name not in self.bound:
            self.bind_new(name, i)

    def bind_view(self, output: str, i: Instruction) -> None:
        for name in i.reads:
            self.view(name, i)
        self.write(output, i)

    def bind_new(self, name: str, i: Instruction) -> None:
        self.bound[name] = View(Storage(name))

    def post(self, i: Instruction) -> None:
        self.begin(i, [], i.kwargs.get("pieces"))

    def begin(
        self, i: Instruction, buffers: list[tuple[Operand, bool]], count: int | None = None
    ) -> None:
        super().begin(i, [], count)

    def check_idle(self, name: str, i: Instruction) -> None:
        """Accept every free: the order of accesses is not checked."""

    def end(self, i: Instruction | None) -> None:
        for name in i.reads if i is not None else ():
            if self.program.has(name, self.rank):
                self.view(name, i)  # type: ignore[arg-type]
