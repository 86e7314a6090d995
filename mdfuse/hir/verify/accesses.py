"""Memory while a program is verified: its names, its contents, and the order of accesses.

Every stream has a vector clock: for each other stream, how far along that one it has waited. An
access is ordered after another one if its stream has waited for at least the other's tick (Lamport
1978, Fidge 1988, Mattern 1989). A communication under way is ordered neither before nor after
anything until a stream waits for it; from then on it counts as work of that stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mdfuse.hir.program import Instruction
from mdfuse.layouts.boxes import Box, box_shape, box_size, intersect

#: The stream that is current when a run starts.
CALLER = -1
#: In place of a stream, in the accesses of a communication that nothing has waited for.
PENDING = -2

Clock = dict[int, int]


@dataclass(slots=True, eq=False)
class Access:
    """A read or write of a region of memory, by a stream or by a communication under way.

    Attributes:
        who: a stream, or PENDING.
        tick: how far the stream had come.
        region: the box of the storage; None for all of it.
        is_write: it changes the region.
        by: the instruction; None for the caller, who wrote the inputs.
    """

    who: int
    tick: int
    region: Box | None
    is_write: bool
    by: Instruction | None


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms in a buffer, where its layout says other ones.

    Attributes:
        op: the reduce op that joins them.
        held: the places of the ranks that they come from, as bits (`spaces.py`).
        is_spread: they come from an instruction that represents several iterations, each of which
            has some of them.
    """

    op: str
    held: int
    is_spread: bool = False


@dataclass(slots=True, eq=False)
class Storage:
    """Memory that one or several names stand for.

    Attributes:
        name: the first name that it has.
        written: box -> elements, disjoint boxes of the written region; None for all of it.
        accesses: the accesses that a later one may have to wait for.
        parts: the chunks whose parts are added up in it, while some are missing.
        terms: box (None: all of it) -> terms, where its layout says other ones.
        of_empty: key of a part without elements -> terms, likewise; several may have one box.
        is_input: it is the caller's.
        frozen_by: the instruction that bound an output as a view of it; it must not change later.
    """

    name: str
    written: dict[Box, int] | None = None
    accesses: list[Access] = field(default_factory=list)
    parts: set[int] | None = None
    terms: dict[Box | None, Terms] = field(default_factory=dict)
    of_empty: dict[object, Terms] = field(default_factory=dict)
    is_input: bool = False
    frozen_by: Instruction | None = None


@dataclass(slots=True, eq=False)
class View:
    """The memory that a name stands for: all of a storage, or a region of it.

    Attributes:
        storage: the memory.
        region: the box of it; None for all of it.
        dims: dim of the view -> dim of the storage; None where they are the same.
        made_by: the instruction that made it a view of another name.
        born: the stream and its tick, where making it may have copied (a reshape).
        is_said: it has its layout, or that of its storage, on the author's word.
    """

    storage: Storage
    region: Box | None = None
    dims: tuple[int, ...] | None = None
    made_by: Instruction | None = None
    born: tuple[int, int] | None = None
    is_said: bool = False


@dataclass(slots=True, eq=False)
class OpenPost:
    """A communication under way.

    Attributes:
        i: the instruction.
        clock: of its stream, when it began.
        pieces: piece (None: the only one) -> its accesses, each with the view of the buffer.
        names: of its buffers, and of their memory.
    """

    i: Instruction
    clock: Clock
    pieces: dict[int | None, list[tuple[View, Access]]]
    names: set[str]


# -- what is written -----------------------------------------------------------------------------


def note_written(storage: Storage, region: Box | None, box: Box) -> None:
    """Record that a region of a storage has contents from now on; `box` is all of the storage."""
    if storage.written is None:
        return
    if region is not None and region not in storage.written:
        fresh = [region]
        for known in storage.written:
            fresh = [part for new in fresh for part in outside(new, known)]
        storage.written.update((part, box_size(part)) for part in fresh)
    if region is None or sum(storage.written.values()) >= box_size(box):
        storage.written = None


def missing(storage: Storage, region: Box) -> int:
    """Count the elements of a region that nothing has written."""
    shared = (intersect(box, region) for box in storage.written or ())
    written = sum(box_size(b) for b in shared if b is not None)
    return max(math.prod(box_shape(region)) - written, 0)


def outside(box: Box, other: Box) -> list[Box]:
    """Return disjoint boxes that cover the elements of a box outside of another one."""
    if intersect(box, other) is None:
        return [box]
    parts, core = [], list(box)
    for d, ((start, stop), (first, last)) in enumerate(zip(box, other, strict=True)):
        for part in ((start, first), (last, stop)):
            if part[0] < part[1]:
                parts.append((*core[:d], part, *core[d + 1 :]))
        core[d] = (max(start, first), min(stop, last))
    return parts


# -- order ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Clocks:
    """The vector clocks of one rank's streams: how far each has waited for each other one."""

    current: int = CALLER
    streams: dict[int, Clock] = field(default_factory=lambda: {CALLER: {CALLER: 0}})

    @property
    def now(self) -> Clock:
        """The clock of the current stream."""
        clock = self.streams.get(self.current)
        return self.of(self.current) if clock is None else clock

    def of(self, stream: int) -> Clock:
        """Return the clock of a stream, a new one where the stream was not seen before."""
        clock = self.streams.get(stream)
        if clock is None:
            clock = self.streams[stream] = {stream: 0}
        return clock

    def snapshot(self, stream: int) -> Clock:
        """Return a stream's clock, for another stream to wait for, and advance the stream."""
        clock = self.of(stream)
        taken = dict(clock)
        clock[stream] += 1
        return taken

    def join(self, taken: Clock) -> None:
        """Let the current stream wait for everything that a snapshot holds."""
        clock = self.now
        for stream, tick in taken.items():
            if clock.get(stream, -1) < tick:
                clock[stream] = tick


def conflict(view: View, is_write: bool, clock: Clock) -> Access | None:
    """Return an earlier access to a view's memory that need not be over yet; None if there is none.

    Args:
        view: the memory that is to be used.
        is_write: whether the new access writes; two reads never conflict.
        clock: how far the stream of the new access has waited for others.
    """
    for a in view.storage.accesses:
        is_free = clock.get(a.who, -1) < a.tick
        if is_free and (is_write or a.is_write) and overlap(a.region, view.region):
            return a
    return None


def overlap(a: Box | None, b: Box | None) -> bool:
    """Return whether two regions of a storage overlap; None is all of the storage."""
    return a is None or b is None or intersect(a, b) is not None


def record(view: View, access: Access) -> None:
    """Record an access that conflicts with none, and drop the accesses that it covers.

    A wait for a write is a wait for all accesses that the write waited for. A wait for a read of a
    stream is a wait for the earlier reads of that stream.
    """
    storage = view.storage
    if not storage.accesses:
        storage.accesses = [access]
        return
    who, region, is_write = access.who, access.region, access.is_write
    pending = [
        a
        for a in storage.accesses
        if a.who == PENDING
        or not (is_write or (a.who == who and not a.is_write))
        or not (region is None or covers(region, a.region))
    ]
    pending.append(access)
    storage.accesses = pending


def covers(a: Box | None, b: Box | None) -> bool:
    """Return whether region `a` contains region `b`; None is all of the storage."""
    return a is None or (
        b is not None and all(p <= r and s <= q for (p, q), (r, s) in zip(a, b, strict=True))
    )
