"""Places of `alloc(memory=symmetric)` buffers in an arena, from a program's text alone.

    %a = alloc(memory=symmetric)     bytes 0-4096
    %b = alloc(memory=symmetric)     bytes 4096-8192
    ...
    wait %sent_a; free %a
    %c = alloc(memory=symmetric)     bytes 0-4096 again

Other ranks remember where a buffer lies, so it is the same in all plans of a program: nothing of
the arguments counts. A place is used again where the stream that is current at the `alloc` comes
behind all that used it, as torch's allocator has it; what is never freed keeps its place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from mdfuse.extents.extent import is_symbolic
from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.instructions import POSTS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.plan.numbered_streams import CALLER

#: Places begin at multiples of this, bytes: torch aligns new buffers so.
_ALIGNED = 512

#: A place is used again for at least one byte of so many.
_WASTE = 2

#: stream -> how many instructions of it were done
Clock = dict[int, int]


@dataclass(frozen=True, slots=True)
class Arena:
    """The places of a program's symmetric buffers.

    Attributes:
        offsets: of each such `alloc`, in order; None: the buffer is not in the arena.
        size: bytes of all.
    """

    offsets: tuple[int | None, ...]
    size: int


@dataclass(slots=True, eq=False)
class _Place:
    """A place: its bytes, the names that hold it, and when each stream used it last."""

    offset: int
    size: int
    holders: set[str] = field(default_factory=set)
    used: Clock = field(default_factory=dict)


def arena(program: HostProgram) -> Arena:
    """Return the places of a program that is written out for a rank."""
    if not any(_is_symmetric(i) for i in program.instructions):
        return Arena((), 0)
    allocator = _Allocator(program)
    for i in program.instructions:
        allocator.step(i)
    return Arena(tuple(allocator.offsets), allocator.size)


def _is_symmetric(i: Instruction) -> bool:
    return i.op == "alloc" and i.kwargs.get("memory") == "symmetric"


class _Allocator:
    """The places that are in use, and were, while one goes through a program."""

    def __init__(self, program: HostProgram) -> None:
        assert program.rank is not None
        self.program, self.rank = program, program.rank
        self.memory = dataflow(program).memory
        self.given = {self.memory(x) for x in (*program.inputs, *program.outputs)}
        self.offsets: list[int | None] = []
        self.size = 0
        self.current = CALLER
        self.handles: dict[str, int] = {}
        self.clocks: defaultdict[int, Clock] = defaultdict(dict)
        self.places: dict[str, set[_Place]] = {}  # name, or handle of a post -> what it holds
        self.idle: list[_Place] = []
        self.to_itself: list[_Place] = []  # what this rank sent to itself

    def step(self, i: Instruction) -> None:
        """Go on by one instruction."""
        clock = self.clocks[self.current]
        clock[self.current] = clock.get(self.current, 0) + 1
        match i.op:
            case "get_stream":
                self.handles[i.outputs[0]] = self.current
            case "set_stream":
                self.current = self.stream(i)
            case "sync":
                self.clocks[self.current] = _later(clock, self.clocks[self.stream(i)])
            case "alloc":
                self.alloc(i)
            case "free":
                for name in i.reads:
                    self.drop(name)
            case "wait":
                self.use(i.reads)
                if "piece" not in i.kwargs:
                    self.drop(i.reads[0])
            case _:
                self.work(i)

    def stream(self, i: Instruction) -> int:
        return int(i.kwargs["stream"]) if i.attrs else self.handles[i.reads[0]]

    def alloc(self, i: Instruction) -> None:
        """Find a place for a symmetric buffer."""
        (name,) = i.outputs
        if not _is_symmetric(i):
            return
        type_ = self.program.types[name]
        size = math.prod(type_.local_shape(self.rank)) * type_.dtype.itemsize
        if is_symbolic(size) or not size or self.memory(name) in self.given:
            self.offsets.append(None)
            return
        place = self.place(-(-size // _ALIGNED) * _ALIGNED)
        self.hold(name, {place})
        self.offsets.append(place.offset)

    def place(self, size: int) -> _Place:
        now = self.clocks[self.current]
        fits = [
            x for x in self.idle if size <= x.size <= _WASTE * size and _later(now, x.used) == now
        ]
        if fits:
            place = min(fits, key=lambda x: (x.size, x.offset))
            self.idle.remove(place)
            return place
        self.size += size
        return _Place(self.size - size, size)

    def work(self, i: Instruction) -> None:
        """Note what an instruction uses, and what shares memory with it."""
        self.use((*i.reads, *i.outputs))
        held = {p for x in i.reads for p in self.places.get(x, ())}
        if i.op in POSTS:
            if i.op == "send" and i.kwargs.get("to") == self.rank:
                self.to_itself += held
            if i.op == "recv" and i.kwargs.get("from") == self.rank:  # may stand for what was sent
                self.hold(i.reads[0], {*self.to_itself})
                held |= {*self.to_itself}
            self.hold(i.outputs[0], held)
            return
        for name in i.outputs:
            if self.memory(name) != name:  # a view
                self.hold(name, held)

    def use(self, names: tuple[str, ...]) -> None:
        now = self.clocks[self.current]
        for place in {p for x in names for p in self.places.get(x, ())}:
            place.used[self.current] = now[self.current]

    def hold(self, name: str, places: set[_Place]) -> None:
        if places:
            self.places.setdefault(name, set()).update(places)
            for place in places:
                place.holders.add(name)

    def drop(self, name: str) -> None:
        """Forget a name; what nobody holds any more is free."""
        self.use((name,))
        for place in self.places.pop(name, ()):
            place.holders.discard(name)
            if not place.holders and place not in self.idle:
                self.to_itself = [x for x in self.to_itself if x is not place]
                self.idle.append(place)


def _later(a: Mapping[int, int], b: Mapping[int, int]) -> Clock:
    """Return the clock of what comes behind two."""
    return {s: max(a.get(s, 0), b.get(s, 0)) for s in a.keys() | b.keys()}
