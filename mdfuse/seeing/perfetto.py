"""Traces: events as Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing show.

A process of the trace is a rank, a thread of it a lane. Arrows lead from a post to its transfer and
to the wait, and from a send to its receive.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mdfuse.seeing.events import Event, lane_place

Record = dict[str, Any]


def write(
    path: str | Path, events: Iterable[Event], names: Mapping[int, str] | None = None
) -> None:
    """Write events as a trace.

    Args:
        path: of the file, which is replaced.
        events: of any ranks.
        names: rank -> its title; by default "rank 0", ….

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({"traceEvents": records(events, names), "displayTimeUnit": "ns"})
    Path(path).write_text(text, encoding="utf-8")


def records(
    events: Iterable[Event], names: Mapping[int, str] | None = None, base_ns: int = 0
) -> list[Record]:
    """Return events as records of the trace format; times are in microseconds from a base.

    Unix time in microseconds has a fraction of 0.25 at best, by which events would overlap.
    """
    rows = [replace(e, start_ns=e.start_ns - base_ns, stop_ns=e.stop_ns - base_ns) for e in events]
    lanes = _lanes(rows)
    return [*_named(lanes, names or {}), *(_slice(e, lanes) for e in rows), *_arrows(rows, lanes)]


_Lanes = dict[tuple[int, str], int]


def _lanes(events: Sequence[Event]) -> _Lanes:
    """Return (rank, lane) -> the number of its thread."""
    by_rank: dict[int, set[str]] = defaultdict(set)
    for e in events:
        by_rank[e.rank].add(e.lane)
    return {
        (rank, lane): n
        for rank, names in sorted(by_rank.items())
        for n, lane in enumerate(sorted(names, key=lane_place))
    }


def _named(lanes: _Lanes, names: Mapping[int, str]) -> Iterator[Record]:
    for rank in sorted({rank for rank, _ in lanes}):
        name = names.get(rank, f"rank {rank}")
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for (rank, lane), n in lanes.items():
        at = {"pid": rank, "tid": n}
        yield {"ph": "M", "name": "thread_name", **at, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": n}}


def _slice(e: Event, lanes: _Lanes) -> Record:
    args: Record = {"instruction": e.instruction}
    if e.source:
        args["source"] = e.source
    if e.part == "transfer":
        args |= {"bytes": e.nbytes, "layouts": e.detail}
    elif e.detail:
        args["detail"] = e.detail
    if e.part == "post" and e.nbytes:
        args["bytes"] = e.nbytes
    return {
        "ph": "X",
        "name": e.name,
        "cat": e.part,
        "pid": e.rank,
        "tid": lanes[e.rank, e.lane],
        "ts": e.start_ns / 1e3,
        "dur": (e.stop_ns - e.start_ns) / 1e3,
        "args": args,
    }


def _arrows(events: Sequence[Event], lanes: _Lanes) -> Iterator[Record]:
    """Yield the arrows of each flow: within each rank, and from senders to receivers."""
    flows: dict[int, list[Event]] = defaultdict(list)
    for e in events:
        if e.flow is not None:
            flows[e.flow].append(e)
    for flow, linked in flows.items():
        by_rank: dict[int, list[Event]] = defaultdict(list)
        for e in linked:
            by_rank[e.rank].append(e)
        for rank, mine in by_rank.items():
            order = ("post", "transfer", "wait")
            chain = [e for part in order for e in mine if e.part == part]
            yield from _chain(f"{flow}.{rank}", chain, lanes)
        transfers = [e for e in linked if e.part == "transfer"]
        to = [e for e in transfers if e.lane == "in" or e.lane.startswith("from ")]
        out = [e for e in transfers if e.lane == "out" or e.lane.startswith("to ")]
        if not transfers:  # in a run the host sees posts and waits alone
            posts = [e for e in linked if e.part == "post"]
            out = [e for e in posts if e.detail.startswith("to ")]
            receivers = {e.rank for e in posts if e.detail.startswith("from ")}
            to = [e for e in linked if e.part == "wait" and e.rank in receivers]
        yield from _chain(f"{flow}", [*out, *to] if out and to else [], lanes)


def _chain(name: str, events: Sequence[Event], lanes: _Lanes) -> Iterator[Record]:
    """Yield arrows through some slices; none where there are fewer than two."""
    last = len(events) - 1
    for n, e in enumerate(events if last > 0 else ()):
        phase = "s" if n == 0 else "f" if n == last else "t"
        yield {
            "ph": phase,
            "id": name,
            "cat": "flow",
            "name": "communication",
            "pid": e.rank,
            "tid": lanes[e.rank, e.lane],
            "ts": e.start_ns / 1e3,
            **({"bp": "e"} if phase == "f" else {}),
        }
