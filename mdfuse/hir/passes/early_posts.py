"""Post the first piece of a ring as soon as it is computed, in what is written out.

    %x.0 = mul(%in.0, 0.5)                          %x.0 = mul(%in.0, 0.5)
    %x.1 = mul(%in.1, 0.5)                          set_stream 1
    set_stream 1                                    sync %caller
    sync %caller                                    %got@2 = alloc
    %c0@0 = send(%x.0, to=me)              ->       %c0@2 = send(%x.0, to=other)
    %c1@0 = recv(%got@0, from=me)                   %c1@2 = recv(%got@2, from=other)
    %c0@1 = send(%x.1, to=me)                       set_stream %caller
    %c1@1 = recv(%got@1, from=me)                   %x.1 = mul(%in.1, 0.5)
    %got@2 = alloc                                  set_stream 1
    %c0@2 = send(%x.0, to=other)                    sync %caller
    %c1@2 = recv(%got@2, from=other)                %c0@0 = send(%x.0, to=me)
                                                    …

What a ring sends is there in symmetric memory, computed piece by piece. A rank's own pieces come
first, since its products on these hide what others send; nothing of them travels. So the first
piece for another rank passes them, and what they wait for: all the pieces. It passes nothing else
that is posted, and the same on all ranks, whose parts are equal: the order of what travels stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mdfuse.extents.extent import is_symbolic
from mdfuse.hir.instructions import COMMUNICATIONS, PURE_VIEWS
from mdfuse.hir.passes.place_symmetric import SYMMETRIC
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.regions import Regions

#: The instructions of a transfer with another rank, or of a rank with itself.
_GROUP = ("group_start", "send", "recv", "group_end")

#: Instructions that bind all of a memory, or a chunk of it.
_BINDS = ("alloc", "chunk")


@dataclass(frozen=True, slots=True)
class _Move:
    """A transfer that goes ahead.

    Attributes:
        to: the place behind which it goes: what writes the piece.
        places: those of its instructions, and of the names that it needs.
        here: what switched to the stream on which the piece is written.
        there: what switched to that of the transfer.
    """

    to: int
    places: tuple[int, ...]
    here: Instruction
    there: Instruction


def run(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, whose rings begin as soon as they can."""
    is_placed = any(
        i.op == "alloc" and i.kwargs.get("memory") == SYMMETRIC for i in program.instructions
    )
    moves = [*_Walk(program).moves()] if is_placed else []
    if not moves:
        return program
    gone = {n for move in moves for n in move.places}
    behind = {move.to: move for move in moves}
    code: list[Instruction] = []
    for n, i in enumerate(program.instructions):
        code += [i] if n not in gone else []
        if n in behind:
            move = behind[n]
            moved = (program.instructions[k] for k in move.places)
            code += [move.there, replace(move.here, op="sync"), *moved, move.here]
    return replace(program, instructions=tuple(code))


class _Walk(Regions):
    """A projection that is written out: which memory names stand for, and the current streams."""

    def __init__(self, program: HostProgram) -> None:
        super().__init__(program)
        self.streams: list[Instruction | None] = []
        current: Instruction | None = None
        for i in self.code:
            if i.op == "get_stream":  # the caller's, by the name that the program gives it
                current = replace(i, op="set_stream", inputs=i.outputs, outputs=())
            elif i.op == "set_stream":
                current = i
            self.streams.append(current)

    def moves(self) -> Iterator[_Move]:
        """Yield the transfers that go ahead: none of which passes another that does."""
        since = 0  # nothing goes ahead of what stands before this place
        for n, i in enumerate(self.code):
            if i.op == "group_start" and self.is_transfer(n):
                if self.is_own(n):
                    continue
                move = self.move(n, since)
                if move is not None:
                    yield move
                since = n + len(_GROUP)
            elif i.op in COMMUNICATIONS and i.op != "wait" and not self.is_inside(n):
                since = n + 1

    def is_transfer(self, at: int) -> bool:
        return tuple(i.op for i in self.code[at : at + len(_GROUP)]) == _GROUP

    def is_inside(self, at: int) -> bool:
        """Tell whether an instruction stands in the group of a transfer."""
        return any(self.is_transfer(n) for n in range(max(at - 3, 0), at))

    def is_own(self, at: int) -> bool:
        send, recv = self.code[at + 1 : at + 3]
        return send.kwargs.get("to") == self.program.rank == recv.kwargs.get("from")

    def move(self, at: int, since: int) -> _Move | None:
        """Return how a transfer goes ahead; None where it stays."""
        (sent,), (got,) = self.code[at + 1].reads, self.code[at + 2].reads
        bound = [self.bound(sent, ("chunk",), at), self.bound(got, ("alloc", "chunk"), at)]
        if None in bound or not self.is_placed(sent) or not self.is_even(sent):
            return None
        written = self.written(self.memory(sent), at)
        to = max((n for n in written if self.touches(self.code[n].outputs, sent)), default=-1)
        if to < since or written[-1] == to or not self.is_fresh(got, to, at):
            return None
        here, there = self.streams[to], self.streams[at]
        if here is None or there is None or here == there:
            return None
        places = sorted({*(n for n in bound if n is not None), *range(at, at + len(_GROUP))})
        return _Move(to, tuple(places), here, there)

    def bound(self, name: str, ops: tuple[str, ...], at: int) -> int | None:
        """Return where a name is bound, if that can go along: nothing else uses it before."""
        first = self.uses[name][0]
        if self.code[first].op not in ops or self.code[first].order is not None:
            return None
        used = (x for n in self.used(name) if first < n < at for x in self.names(n))
        return first if name not in used else None

    def used(self, name: str) -> list[int]:
        """Return where the memory of a name is used."""
        return [*dict.fromkeys(n for n, _ in self.of_memory[self.memory(name)])]

    def names(self, at: int) -> tuple[str, ...]:
        return (*self.code[at].reads, *self.code[at].outputs)

    def is_placed(self, sent: str) -> bool:
        """Tell whether what is sent lies in symmetric memory, where this rank alone writes."""
        uses = [self.code[n] for n in self.used(sent)]
        is_symmetric = uses[0].op == "alloc" and uses[0].kwargs.get("memory") == SYMMETRIC
        return is_symmetric and not any(i.op in ("post", "recv") for i in uses)

    def is_even(self, sent: str) -> bool:
        """Tell whether all ranks have equally much of what is sent, and of each piece of it."""
        kind = self.program.types[sent]
        layout = kind.layout
        if layout is None or layout.blocked or layout.stream is None or kind.padding is not None:
            return False
        stream = layout.stream
        for dim, rows in enumerate(kind.shape):
            parts = math.prod(layout.mesh.axis_size(a) for a in layout.split_axes(dim))
            pieces = stream.chunks if dim == stream.dim else 1
            if is_symbolic(rows):
                is_divided = parts == pieces == 1
            elif isinstance(pieces, tuple):
                is_divided = rows == parts * sum(pieces)
            else:
                is_divided = rows % (parts * pieces) == 0
            if not is_divided:
                return False
        return True

    def is_fresh(self, got: str, to: int, at: int) -> bool:
        """Tell whether nothing has used the place where a transfer arrives."""
        uses = [n for n in self.used(got) if n < at]
        if self.memory(got) == got:
            return True
        is_there = uses[0] < to and self.code[uses[0]].op == "alloc"
        return (
            is_there
            and self.streams[uses[0]] == self.streams[to]
            and not any(
                self.touches(self.names(n), got) for n in uses if self.code[n].op not in _BINDS
            )
        )

    def written(self, memory: str, before: int) -> list[int]:
        """Return where elements of a memory are written, before a place."""
        skipped = ("alloc", *COMMUNICATIONS, *PURE_VIEWS)
        uses = (n for n in self.used(memory) if n < before and self.code[n].op not in skipped)
        return [n for n in uses if any(self.memory(x) == memory for x in self.code[n].outputs)]

    def touches(self, names: Iterable[str], name: str) -> bool:
        """Tell whether one of some names may stand for elements that a name stands for."""
        memory = self.memory(name)
        return any(self.memory(x) == memory and self.meet(x, name) for x in names)
