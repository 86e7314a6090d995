"""Find the syncs of a straight-line program without which two accesses would have no order.

The walk is the flow of the program. It also remembers the syncs that put each entry into the clock
of a stream. If an access must follow one of another stream, the fewest syncs that order them are
needed; likewise the syncs that order all streams before the return.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mdfuse.hir.program import Instruction
from mdfuse.hir.verify.accesses import PENDING, Clock, Clocks, View, overlap
from mdfuse.hir.verify.flow import Flow, Steps

#: The attribute that numbers syncs, since several may be equal.
MARK = "mark"

Marks = frozenset[int]


class _Taken(dict[int, int]):
    """A snapshot of a stream's clock, with the syncs from which the stream knows each entry."""

    via: dict[int, Marks]


@dataclass(slots=True)
class _History(Clocks):
    """Clocks that also remember the syncs behind each entry."""

    #: (stream, another one) -> syncs -> the tick of the other one that the stream knows from them
    learned: dict[tuple[int, int], dict[Marks, int]] = field(default_factory=dict)

    def snapshot(self, stream: int) -> Clock:
        taken = _Taken(Clocks.snapshot(self, stream))
        taken.via = {of: self.fewest(stream, of, tick) for of, tick in taken.items()}
        return taken

    def learn(self, taken: Clock, marks: Marks) -> None:
        """Let the current stream wait for a snapshot, as `join`, and remember from which syncs.

        Args:
            taken: the snapshot.
            marks: the sync that makes it wait; empty for the wait of a communication.
        """
        clock = self.now
        for of, tick in taken.items():
            if clock.get(of, -1) < tick:
                via = taken.via[of] if isinstance(taken, _Taken) else frozenset()
                self.learned.setdefault((self.current, of), {})[marks | via] = tick
        self.join(taken)

    def fewest(self, stream: int, of: int, tick: int, needed: Marks = frozenset()) -> Marks:
        """Return the syncs from which `stream` knows that stream `of` has come as far as `tick`.

        Among several ways to know this, the one that adds fewest to the syncs in `needed` counts.
        """
        learned = self.learned.get((stream, of), {})
        ways = [way for way, known in learned.items() if known >= tick]
        return min(ways, key=lambda way: len(way - needed), default=frozenset())


@dataclass
class Needed(Flow):
    """A `Flow` over one rank's instructions that collects in `marks` the syncs that are needed."""

    marks: Marks = frozenset()
    clocks: _History = field(default_factory=_History)

    @property
    def steps(self) -> Steps:
        return {**super().steps, "sync": Needed.sync, "wait": Needed.wait}

    def sync(self, i: Instruction) -> None:
        other = self.stream(i)
        if other != self.clocks.current:
            mark = i.kwargs.get(MARK)
            marks: Marks = frozenset() if mark is None else frozenset({mark})
            self.clocks.learn(self.clocks.snapshot(other), marks)

    def wait(self, i: Instruction) -> None:
        posted = self.posted.get(i.reads[0])
        if posted is not None:
            self.clocks.learn(posted.clock, frozenset())
        super().wait(i)

    def check_order(self, name: str, view: View, is_write: bool, i: Instruction) -> None:
        super().check_order(name, view, is_write, i)
        self.need(view, is_write)

    def check_joined(self, name: str, view: View, i: Instruction | None) -> None:
        super().check_joined(name, view, i)
        self.need(view, True)

    def need(self, view: View, is_write: bool) -> None:
        """Mark the syncs that order this use of a view after accesses of other streams."""
        before = [
            (a.who, a.tick)
            for a in view.storage.accesses
            if (is_write or a.is_write) and a.who != PENDING and overlap(a.region, view.region)
        ]
        current = self.clocks.current
        for who, tick in (*before, *((view.born,) if view.born is not None else ())):
            if who != current:
                self.marks |= self.clocks.fewest(current, who, tick, self.marks)
