"""Predicted times beside measured ones."""

from __future__ import annotations

from mdfuse.seeing import Event, Timeline
from mdfuse.seeing.deviation import compare


def work(rank: int, number: int, start: int, stop: int) -> Event:
    return Event(rank, "host", f"i{number}", start, stop, number)


def test_each_instruction_and_the_whole() -> None:
    """Ranks 0 to 2 run alike; of those measured the median counts; what one lacks is left out."""
    predicted = Timeline(
        name="p",
        events=(work(0, 0, 0, 10), work(0, 3, 10, 40), work(0, 9, 40, 60)),
        ranks={0: (0, 1, 2)},
        costs="c",
    )
    wait = Event(0, "wait", "wait", 60, 80, 5, part="wait")
    measured = [
        *(work(r, 0, 0, 11 + r) for r in range(3)),
        *(work(r, 3, 20, 30 + r) for r in range(3)),
        work(0, 4, 40, 50),
        wait,
    ]
    whole, rows = compare(predicted, measured)
    assert whole == (60 - 80) / 80
    assert [(d.rank, d.instruction, d.predicted_ns, d.measured_ns) for d in rows] == [
        (0, 3, 30, 11),
        (0, 0, 10, 12),
    ]


def test_nothing_measured_is_no_deviation() -> None:
    assert compare(Timeline(name="p", events=(), ranks={}, costs="c"), []) == (0.0, [])
