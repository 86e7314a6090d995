"""Work beside communications: how much longer it takes, since they share its resources.

work 10 µs, transfer from 4 to 8 µs that takes a quarter of the speed    ->    1 µs more
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mdfuse.seeing.costs import MOST_SLOWED
from mdfuse.seeing.events import Event

#: The rounding error of a share that should be 0 when all transfers are over.
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Start and stop of a transfer, ns, and the share of its speed that work loses meanwhile."""

    start: float
    stop: float
    slows: float


def slowed(
    events: Iterable[Event], slows: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Return the seconds that work takes longer: (rank, instruction) -> seconds.

    Args:
        events: of a timeline in which nothing is slowed.
        slows: (rank, flow) of a transfer -> the share of its speed that work loses meanwhile.
    """
    transfers: dict[int, list[_Transfer]] = defaultdict(list)
    streams: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for e in events if slows else ():
        if e.part == "transfer" and e.flow is not None:
            if share := slows.get((e.rank, e.flow)):
                transfers[e.rank].append(_Transfer(e.start_ns, e.stop_ns, share))
        elif e.part == "work":
            streams[e.rank, e.lane].append(e)
    delays: dict[tuple[int, int], float] = {}
    for (rank, _), row in streams.items():
        delays.update(_of_stream(row, _merged(transfers[rank])))
    return delays


def _merged(transfers: Iterable[_Transfer]) -> list[_Transfer]:
    """Return the spans between starts and stops, with the total share of all transfers then."""
    changes: dict[float, float] = defaultdict(float)
    for x in transfers:
        changes[x.start] += x.slows
        changes[x.stop] -= x.slows
    spans, share = [], 0.0
    for start, stop in itertools.pairwise(sorted(changes)):
        share += changes[start]
        if share > _NOTHING:
            spans.append(_Transfer(start, stop, min(share, MOST_SLOWED)))
    return spans


def _of_stream(
    row: Iterable[Event], transfers: Sequence[_Transfer]
) -> Iterable[tuple[tuple[int, int], float]]:
    """Yield the delay of each work of a stream, in order; idle time absorbs earlier delays."""
    late, at, stop = 0.0, 0, 0
    for e in sorted(row, key=lambda e: (e.start_ns, e.stop_ns)):
        late = max(0.0, late - (e.start_ns - stop))
        start, stop = e.start_ns + late, e.stop_ns
        while at < len(transfers) and transfers[at].stop <= start:
            at += 1
        taken = e.stop_ns - e.start_ns
        delay = _end(start, taken, itertools.islice(transfers, at, None)) - start - taken
        if delay > 0:
            late += delay
            yield (e.rank, e.instruction), delay / 1e9


def _end(start: float, work: float, transfers: Iterable[_Transfer]) -> float:
    """Return when some work is done that begins at a time."""
    now, left = start, work
    for t in transfers:
        if now + left <= t.start:
            break
        if t.start > now:
            left -= t.start - now
            now = t.start
        speed = 1.0 - t.slows
        done = max(0.0, t.stop - now) * speed
        if left <= done:
            return now + left / speed
        left -= done
        now = max(now, t.stop)
    return now + left
