"""Which names of a straight program share memory that is written while they are in use."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

from mdfuse.hir.analysis.dataflow import shared_operand, storage
from mdfuse.hir.instructions import POSTS, received
from mdfuse.hir.program import HostProgram, Instruction


def updated_names(program: HostProgram) -> frozenset[str]:
    """Return the names that may share memory with what is written again while they are in use.

    An output is still in use after the run, when the next one may write: so an output that is a
    view of an input that the program writes is among them.
    """
    uses = _Uses(program)
    numbers = count()
    for i in program.instructions:
        uses.note(numbers, i)
    return frozenset(filter(uses.sees_write, uses.shared)) | uses.changed


class _Uses:
    """Where the names of a straight-line program are bound, written and used last."""

    def __init__(self, program: HostProgram) -> None:
        self.shared, self.inputs = storage(program), frozenset(program.inputs)
        self.outputs = frozenset(program.outputs)
        self.first: dict[str, int] = dict.fromkeys(program.inputs, -1)
        self.last: dict[str, float] = {}
        #: memory -> the instructions that write into it while it has a value
        self.writes: dict[str, list[int]] = defaultdict(list)
        #: names through which something is written, which must not show in what they are views of
        self.changed: set[str] = set()
        #: buffers that hold nothing yet: the first result there binds their names
        self.unfilled: set[str] = set()
        #: name -> those that it is a view of; handle -> the buffers of its post
        self.of: dict[str, set[str]] = defaultdict(set)

    def note(self, numbers: Iterator[int], i: Instruction) -> None:
        """Note what an instruction, and each inside it in turn, binds, writes and uses."""
        if i.op == "free":
            return
        for j in i.walk():
            if j.op == "launch":
                continue  # what is inside it reads its inputs and binds its outputs
            n = next(numbers)
            if j.op == "alloc" and "fill" not in j.kwargs:
                self.unfilled.update(j.outputs)
            else:
                for name in self.unfilled.intersection(j.outputs).difference(j.reads):
                    del self.first[name]
                self.unfilled.difference_update((*j.reads, *j.outputs))
            for name in (*j.reads, *j.outputs):
                self.use(name, n)
            for name in (*received(j), *(x for x in j.outputs if x in self.first)):
                self.writes[self.shared.get(name, name)].append(n)
                self.changed |= self.bases(name)
            operand = shared_operand(j)
            for name in j.outputs:
                self.first.setdefault(name, n)
                self.of[name].update(j.reads if j.op in POSTS else (operand,) if operand else ())
                self.use(name, n)

    def use(self, name: str, n: float) -> None:
        """Note that instruction `n` uses a name, and with it what the name is a view of."""
        n = math.inf if name in self.outputs else n
        for base in self.bases(name):
            self.last[base] = max(n, self.last.get(base, -1))

    def bases(self, name: str) -> set[str]:
        """Return a name, what it is a view of, what that is a view of, …"""
        found, waiting = {name}, [name]
        while waiting:
            new = self.of.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    def sees_write(self, name: str) -> bool:
        """Tell whether a name's memory is written between its binding and its last use."""
        of, last = self.shared[name], self.last.get(name, -1)
        writes = self.writes.get(of, [])
        if last == math.inf and of in self.inputs:
            return bool(writes)  # the next run writes there again
        later = bisect_right(writes, self.first.get(name, math.inf))
        return later < len(writes) and writes[later] < last
