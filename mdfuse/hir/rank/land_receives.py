"""Receive what is only copied on where it belongs, in what is written out.

    %got = alloc                                    %y = chunk(%whole)
    %c = recv(%got, from=1)                         %c = recv(%y, from=1)
    %y = chunk(%whole)                     ->       wait %c
    wait %c
    %y = set(%got)
    free %got

So the first part of a sum in a ring is no copy. Only into memory of which nothing used this part
before, so that there is nothing to wait for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.storage import storage
from mdfuse.layouts.boxes import intersect


@dataclass(frozen=True, slots=True)
class _Landing:
    """What is received: its buffer, and the name that it is copied to.

    Attributes:
        alloc, recv, copy: where these instructions stand.
        view: where the one that binds the name stands, if that is a view behind the `alloc`.
    """

    got: str
    into: str
    alloc: int
    recv: int
    copy: int
    view: int | None


def run(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, without copies of what arrives."""
    code = program.instructions
    if not any(i.op == "recv" for i in code):
        return program
    found = [*_Uses(program).landings()]
    if not found:
        return program
    kept: dict[int, Instruction | None] = {}
    for x in found:
        kept[x.alloc] = None
        if x.view is not None:
            kept[x.alloc], kept[x.view] = code[x.view], None
        kept[x.recv] = replace(code[x.recv], inputs=(x.into,))
        kept[x.copy] = None
    gone = {x.got for x in found}
    rows = (_without(kept.get(n, i), gone) for n, i in enumerate(code))
    return replace(program, instructions=tuple(i for i in rows if i is not None))


def _without(i: Instruction | None, gone: set[str]) -> Instruction | None:
    if i is None or i.op != "free" or gone.isdisjoint(i.reads):
        return i
    left = tuple(x for x in i.reads if x not in gone)
    return i.changed(inputs=left) if left else None


class _Uses:
    """Where names are used, and memory."""

    def __init__(self, program: HostProgram) -> None:
        self.program, self.shared = program, storage(program)
        self.of_name: defaultdict[str, list[int]] = defaultdict(list)
        self.of_memory: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for n, i in enumerate(program.instructions):
            for name in dict.fromkeys((*i.reads, *i.outputs)):
                self.of_name[name].append(n)
                self.of_memory[self.shared.get(name, name)].append((n, name))

    def landings(self) -> Iterator[_Landing]:
        for n, i in enumerate(self.program.instructions):
            if i.op == "recv":
                found = self.landing(i.reads[0], n)
                if found is not None:
                    yield found

    def landing(self, got: str, recv: int) -> _Landing | None:
        """Return what becomes of a received buffer that is allocated, copied and freed."""
        code, uses = self.program.instructions, self.of_name[got]
        if len(uses) != 4 or uses[1] != recv:
            return None
        alloc, copy, free = (code[uses[n]] for n in (0, 2, 3))
        is_plain = alloc.op == "alloc" and not alloc.attrs and alloc.order is None
        if not is_plain or copy.fn != "set" or copy.order is not None or free.op != "free":
            return None
        (into,) = copy.outputs
        if not self._alike(got, into):
            return None
        made = self.of_name[into][0]
        view = made if made > uses[0] else None
        if view is not None and (code[view].op != "chunk" or not self._is_there(view, uses[0])):
            return None
        if any(self._meet(into, name) for name in self._before(into, uses[2])):
            return None
        return _Landing(got, into, uses[0], recv, uses[2], view)

    def _alike(self, a: str, b: str) -> bool:
        types, rank = self.program.types, self.program.rank
        assert rank is not None
        x, y = types[a], types[b]
        return x.dtype == y.dtype and x.local_shape(rank) == y.local_shape(rank)

    def _is_there(self, view: int, before: int) -> bool:
        """Return whether the operand of a view is bound before an instruction, and not again."""
        (operand,) = self.program.instructions[view].reads
        return self.of_name[operand][0] < before

    def _before(self, into: str, stop: int) -> Iterator[str]:
        """Yield the names through which the memory is read or written before an instruction."""
        root = self.shared.get(into, into)
        if root in self.program.inputs:
            yield root
        for n, name in self.of_memory[root]:
            op = self.program.instructions[n].op
            if n < stop and (op not in ("alloc", "chunk", "free") or self._fills(n)):
                yield name

    def _fills(self, n: int) -> bool:
        return "fill" in self.program.instructions[n].kwargs

    def _meet(self, a: str, b: str) -> bool:
        rank, types = self.program.rank, self.program.types
        assert rank is not None
        return intersect(types[a].box(rank), types[b].box(rank)) is not None
