"""Which elements of which memory the names of a projection stand for, where it is written out."""

from __future__ import annotations

from collections import defaultdict

from mdfuse.hir.program import HostProgram
from mdfuse.hir.storage import storage
from mdfuse.layouts.boxes import Box, intersect

#: Views of rows of a memory.
VIEWS = ("chunk", "select")


class Regions:
    """A projection that is written out: where names are used, and what of a memory they are."""

    def __init__(self, program: HostProgram) -> None:
        self.program, self.code = program, program.instructions
        self.shared = storage(program)
        self.uses: defaultdict[str, list[int]] = defaultdict(list)
        self.of_memory: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for n, i in enumerate(self.code):
            for name in dict.fromkeys((*i.reads, *i.outputs)):
                self.uses[name].append(n)
                self.of_memory[self.memory(name)].append((n, name))

    @property
    def rank(self) -> int:
        assert self.program.rank is not None
        return self.program.rank

    def memory(self, name: str) -> str:
        return self.shared.get(name, name)

    def meet(self, a: str, b: str) -> bool:
        """Tell whether two names of one memory may share elements."""
        x, y = self.region(a), self.region(b)
        return x is None or y is None or intersect(x, y) is not None

    def region(self, name: str) -> Box | None:
        """Return the elements of its memory that a name stands for, as rows of each dim.

        None where views made it that take something else than rows.
        """
        first = self.code[self.uses[name][0]]
        if first.op == "own":  # a rank's term of its rows
            (name,) = first.reads
        region = list(self.box(name))
        while (bind := self.code[self.uses[name][0]]).op in VIEWS and name in bind.outputs:
            (name,) = bind.reads
            if bind.op == "select":
                whole = self.box(name)
                dim = bind.kwargs["dim"] % len(whole)
                start = range(*whole[dim])[bind.kwargs["index"]]
                region.insert(dim, (start, start + 1))
        return tuple(region) if name == self.memory(name) else None

    def box(self, name: str) -> Box:
        return self.program.types[name].box(self.rank)
