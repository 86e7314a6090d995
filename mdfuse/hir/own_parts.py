"""Which parts that a rank sends to itself need not be copied: nothing writes where they lie.

The name that receives such a part may stand for what was sent; plans let it, and costs know it.
"""

from __future__ import annotations

from collections import Counter

from mdfuse.hir.analysis.dataflow import shared_operand, storage
from mdfuse.hir.instructions import received
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.updates import updated_names


def uncopied(program: HostProgram) -> frozenset[str]:
    """Return the handles of transfers of a rank with itself that move nothing.

    On several streams alone: on one a copy is made at once, and its source may be gone.

    Args:
        program: of one rank, written out.
    """
    own = [
        i
        for i in program.instructions
        if program.rank in (i.kwargs.get("to"), i.kwargs.get("from"))
    ]
    if not own or not any(i.op == "set_stream" for i in program.instructions):
        return frozenset()
    parts = OwnParts(program, updated_names(program))
    sends, recvs = ([i for i in own if i.op == op] for op in ("send", "recv"))
    found: set[str] = set()
    for send, recv in zip(sends, recvs, strict=False):  # the first that is sent comes first
        a, b = (program.local_shape(i.reads[0]) for i in (send, recv))
        if a == b and parts.is_kept(send) and parts.is_read_only(recv.reads[0]):
            found.update((*send.outputs, *recv.outputs))
    return frozenset(found)


class OwnParts:
    """What a written-out program does with the buffers of what a rank sends to itself."""

    def __init__(self, program: HostProgram, updated: frozenset[str]) -> None:
        self.shared, self.ends = storage(program), {*program.inputs, *program.outputs}
        self.made = Counter(n for i in program.walk() for n in i.outputs)
        self.filled = Counter(x for i in program.walk() for x in received(i))
        self.seen = Counter(self.shared.get(n, n) for n in self.shared)
        self.changed = {self.shared.get(n, n) for n in updated} | {*program.written_inputs}
        #: memory -> where it is written last; handle of a send -> where that stands
        self.written: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        for at, i in enumerate(program.instructions):
            if i.op == "send":
                self.sent[i.outputs[0]] = at
            for j in i.walk():
                names = j.outputs if j.op != "alloc" and shared_operand(j) is None else ()
                for name in (*names, *received(j)):
                    self.written[self.shared.get(name, name)] = at

    def is_kept(self, send: Instruction) -> bool:
        """Return whether nothing writes into the memory of what is sent while it has a value.

        Or it does so piece by piece, and only before.
        """
        memory = self.shared.get(send.reads[0], send.reads[0])
        is_over = self.written.get(memory, -1) < self.sent[send.outputs[0]]
        return memory not in self.changed or (is_over and memory not in self.ends)

    def is_read_only(self, name: str) -> bool:
        """Return whether one receive fills a buffer, which otherwise is read under its own name."""
        once = self.made[name] == self.filled[name] == self.seen[name] == 1
        return once and name not in self.ends and self.shared.get(name, name) == name
