"""Errors of a predicted timeline against a measured run, instruction by instruction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mdfuse.seeing.events import Event, makespan
from mdfuse.seeing.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The predicted and the measured time of an instruction of a rank.

    Attributes:
        rank: the first one of ranks that run alike.
        instruction: its number in the rank's written-out program.
        name: as in events.
        predicted_ns: by the table of costs.
        measured_ns: the median of ranks that run alike.
    """

    rank: int
    instruction: int
    name: str
    predicted_ns: int
    measured_ns: int


def compare(predicted: Timeline, measured: Sequence[Event]) -> tuple[float, list[Deviation]]:
    """Return the error of the predicted makespan, and the times of each instruction.

    Args:
        predicted: of a program.
        measured: the events of one run of it, as `mdfuse.seeing.traces.last_run` gives them.

    Returns:
        (predicted - measured) / measured of the whole, 0.1 for 10 % too much; and the instructions
        that are in both, in the order of falling differences. Waits are left out: they follow from
        other ranks' work.
    """
    guessed = _taken(predicted.events)
    taken = _taken(measured)
    rows = []
    for (rank, number), (name, ns) in guessed.items():
        alike = [taken[r, number][1] for r in predicted.ranks[rank] if (r, number) in taken]
        if alike:
            middle = sorted(alike)[len(alike) // 2]
            rows.append(
                Deviation(
                    rank=rank, instruction=number, name=name, predicted_ns=ns, measured_ns=middle
                )
            )
    rows.sort(key=lambda d: -abs(d.predicted_ns - d.measured_ns))
    whole = makespan(measured)
    return (makespan(predicted.events) - whole) / whole if whole else 0.0, rows


def _taken(events: Iterable[Event]) -> dict[tuple[int, int], tuple[str, int]]:
    """Return (rank, instruction) -> name and time of the work of each instruction."""
    times: dict[tuple[int, int], int] = defaultdict(int)
    names: dict[tuple[int, int], str] = {}
    for e in events:
        if e.part == "work" and e.instruction >= 0:
            key = e.rank, e.instruction
            times[key] += e.stop_ns - e.start_ns
            names.setdefault(key, e.name)
    return {key: (names[key], ns) for key, ns in times.items()}
