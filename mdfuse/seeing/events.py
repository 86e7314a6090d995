"""Events: the actions of a rank and their times, measured in a run or predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mdfuse.hir.program import Instruction

Part = Literal["work", "post", "transfer", "wait"]

#: Lanes are shown in this order, by their first words; links come last.
_LANES = ("host", "stream", "device", "wait")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time on a rank.

    Attributes:
        rank: which rank.
        lane: where on the rank: "host", "stream 0", "wait", or the link of a communication: "tp",
            "out", "to 1". Events on one lane of a rank do not overlap.
        name: as programs print it: "%y = linear", "allreduce[sum]".
        start_ns: when it began, nanoseconds.
        stop_ns: when it ended.
        instruction: its number in the rank's written-out program; -1 where there is none.
        flow: the number of a communication: its posts, transfers and waits share it, on all ranks.
        part: which part of a communication it is; "work" for all that is none.
        source: the user's line.
        nbytes: bytes that a transfer brings to this rank.
        detail: further text, as a change of layout.
    """

    rank: int
    lane: str
    name: str
    start_ns: int
    stop_ns: int
    instruction: int = -1
    flow: int | None = None
    part: Part = "work"
    source: str = ""
    nbytes: int = 0
    detail: str = ""


def lane_place(lane: str) -> tuple[int, str]:
    """Return the sort key of a lane of a rank."""
    first = lane.split(" ")[0]
    return _LANES.index(first) if first in _LANES else len(_LANES), lane


def name_of(i: Instruction) -> str:
    """Return an instruction's name as programs print it; an iteration has its number: `@2`.

    A sum over chunks has the number of the iteration that adds to it.
    """
    sums = {n for j in i.walk() if j.op in ("accumulate", "addmm") for n in j.outputs}
    number = next((x.rpartition("@")[2] for x in i.reads if "@" in x), "") if sums else ""
    outputs = ", ".join(f"%{n}@{number}" if n in sums and number else f"%{n}" for n in i.outputs)
    return f"{outputs} = {i.fn or i.op}" if outputs else i.fn or i.op


def makespan(events: Iterable[Event]) -> int:
    """Return the nanoseconds from the first start to the last stop; 0 without events."""
    listed = [*events]
    if not listed:
        return 0
    return max(e.stop_ns for e in listed) - min(e.start_ns for e in listed)


def lanes(events: Iterable[Event]) -> dict[tuple[int, str], list[Event]]:
    """Return the events of each lane of each rank, in the order of their starts."""
    by_lane: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        by_lane[event.rank, event.lane].append(event)
    for row in by_lane.values():
        row.sort(key=lambda e: (e.start_ns, e.stop_ns))
    return dict(by_lane)


def busy(events: Sequence[Event]) -> int:
    """Return the nanoseconds of events that do not overlap."""
    return sum(e.stop_ns - e.start_ns for e in events)
