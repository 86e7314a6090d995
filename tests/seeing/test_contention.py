"""Work beside transfers takes what a clock of small steps says."""

import random

import pytest

from mdfuse.seeing.contention import slowed
from mdfuse.seeing.events import Event


def drawn(seed: int) -> tuple[list[Event], dict[tuple[int, int], float]]:
    """A stream of work with gaps, and transfers that may overlap each other."""
    random.seed(seed)
    events, at = [], 0
    for n in range(random.randint(1, 12)):
        at += random.choice((0, 0, random.randint(1, 40)))
        stop = at + random.randint(1, 50)
        events.append(Event(0, "host", "work", at, stop, n))
        at = stop
    slows = {}
    for flow in range(random.randint(1, 5)):
        start = random.randint(0, at)
        stop = start + random.randint(1, 80)
        events.append(Event(0, f"link {flow}", "t", start, stop, 99, flow=flow, part="transfer"))
        slows[0, flow] = random.choice((0.0, 0.1, 0.25, 0.5))
    random.shuffle(events)
    return events, slows


def stepped(
    events: list[Event], slows: dict[tuple[int, int], float], steps: int
) -> dict[int, float]:
    """Instruction -> ns that it takes longer, in steps of a fraction of a nanosecond."""
    shares = [
        (e.start_ns, e.stop_ns, slows[0, e.flow])
        for e in events
        if e.part == "transfer" and e.flow is not None
    ]
    found, now = {}, 0.0
    for e in sorted((e for e in events if e.part == "work"), key=lambda e: e.start_ns):
        now = start = max(now, float(e.start_ns))
        left = float(e.stop_ns - e.start_ns)
        while left > 1e-9:
            middle = now + 0.5 / steps
            taken = sum(x for a, b, x in shares if a <= middle < b)
            left -= (1 - min(taken, 0.95)) / steps
            now += 1 / steps
        found[e.instruction] = now - start - (e.stop_ns - e.start_ns)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_drawn_streams(seed: int) -> None:
    events, slows = drawn(seed)
    found = slowed(events, slows)
    for number, ns in stepped(events, slows, 64).items():
        assert found.get((0, number), 0.0) * 1e9 == pytest.approx(ns, abs=0.5)


def test_nothing_is_slowed_where_nothing_slows() -> None:
    events, _ = drawn(1)
    assert slowed(events, {}) == {}
