"""Traces of runs: read the files of all ranks, by one clock."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mdfuse.errors import ProgramError, shown
from mdfuse.interpreter.json_text import from_json
from mdfuse.seeing.events import Event
from mdfuse.seeing.trace_files import Entry


def read(path: str | Path) -> list[Event]:
    """Return the events of a traced run, in the order of their starts.

    Times are unix time by the clock of rank 0, in nanoseconds. A run that an error broke off ends
    with its last action: an event without length, "… (did not end)". A rank that was killed leaves
    its written notes, at the latest from before its last wait: "… (last noted)".

    Args:
        path: a folder that `Options.trace` named, or one file of it.

    Raises:
        ProgramError: there is no trace, or the files are no traces.
    """
    return read_files(files_of(path))


def files_of(path: str | Path) -> list[Path]:
    """Return the files of a folder, or a file alone; ProgramError where a folder has none."""
    path = Path(path)
    files = sorted(path.glob("rank*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise _no_trace(path, "the folder has no files rank0.jsonl, rank1.jsonl, …")
    return files


def read_files(files: Sequence[Path]) -> list[Event]:
    """Return the events of the files of a job, which may be in several folders; see `read`."""
    flows = _Flows()
    events = [e for file in files for _, _, e in _TraceReader(file, flows).events()]
    return sorted(events, key=_when)


def writer_of(path: Path) -> tuple[int, tuple[str, int] | None]:
    """Return which rank wrote a file, and its host and process; None: it does not say so.

    ProgramError where it is no trace; an empty file is rank 0's.
    """
    empty: dict[str, Any] = {"rank": 0}
    head = next(_TraceReader(path, _Flows()).lines(), empty)
    host, pid = head.get("host"), head.get("pid")
    where = (host, pid) if isinstance(host, str) and isinstance(pid, int) else None
    return head["rank"], where


def last_run(path: str | Path, program: str) -> list[Event]:
    """Return the events of the last run of a program in a trace; see `read`.

    Raises:
        ProgramError: there is no trace, or none of this program.
    """
    path = Path(path)
    flows, rows = _Flows(), list[Event]()
    for file in sorted(path.glob("rank*.jsonl")) if path.is_dir() else [path]:
        runs = [(run, e) for name, run, e in _TraceReader(file, flows).events() if name == program]
        last = max((run for run, _ in runs), default=None)
        rows += [e for run, e in runs if run == last]
    if not rows:
        raise _no_trace(path, f"it has no run of @{program}")
    return sorted(rows, key=_when)


def _when(e: Event) -> tuple[int, int, int]:
    return e.start_ns, e.rank, e.stop_ns


def _no_trace(path: Path, why: str) -> ProgramError:
    return ProgramError(
        f"{path} is no trace of mdfuse",
        because=why,
        hint="name a folder that Options(trace=) or MDFUSE_TRACE named in a run",
    )


class _Flows:
    """Numbers of communications: the n-th of a team, or from a rank to another, has one."""

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}

    def number(self, key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))


_Row = tuple[str, int, Event]


@dataclass
class _TraceReader:
    """Reads the lines of one rank in order.

    Attributes:
        path: of the file.
        flows: of all ranks.
        rank: which rank wrote it.
        clocks: the times at which its clock was aligned, with the offsets there.
        plans: number -> program and entries.
        counts: how many communications of a team, or between two ranks, there were.
        partial: (plan, run) -> times of a run that has not come to its end yet.
        device: of the run that ends next: entries, and when a GPU began and ended each.
    """

    path: Path
    flows: _Flows
    rank: int = 0
    clocks: list[tuple[int, int]] = field(default_factory=list)
    plans: dict[int, tuple[str, list[Entry | None]]] = field(default_factory=dict)
    counts: Counter[Hashable] = field(default_factory=Counter)
    partial: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    device: list[tuple[int, int, int]] = field(default_factory=list)

    def events(self) -> Iterator[_Row]:
        """Yield the program, the run of its plan, and the event."""
        try:
            yield from self._events()
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            what = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise _no_trace(self.path, f"a line does not fit: {what}") from error

    def _events(self) -> Iterator[_Row]:
        lines = [*self.lines()]
        self.clocks = [(x.get("at", 0), x["clock"]) for x in lines if "clock" in x]
        for line in lines:
            if "rank" in line:
                self.rank = line["rank"]
            elif "entries" in line:
                entries = [_entry(e) if e is not None else None for e in line["entries"]]
                self.plans[line["plan"]] = line["program"], entries
            elif "ns" in line:
                times = self.partial.setdefault((line["plan"], line["run"]), [])
                times += line["ns"]
            elif "device" in line:
                self.device = line["device"]
            elif "end" in line:
                key = line["plan"], line["end"]
                yield from self._run(*key, self.partial.pop(key, []))
            elif "broken" in line:
                key = line["plan"], line["broken"]
                yield from self._run(*key, self.partial.pop(key, []), "did not end")
        for key, times in self.partial.items():
            yield from self._run(*key, times, "last noted")

    def _offset(self, time: int) -> int:
        """Return the offset of a time: clocks drift evenly from alignment to alignment."""
        if not self.clocks:
            return 0
        behind = bisect_right(self.clocks, time, key=lambda pair: pair[0])
        if behind in (0, len(self.clocks)):
            return self.clocks[max(behind - 1, 0)][1]
        (at, offset), (later, other) = self.clocks[behind - 1 : behind + 1]
        return offset + (other - offset) * (time - at) // max(later - at, 1)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines; the last one may be torn, where the rank died in the middle of it."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise _no_trace(self.path, str(error)) from error
        for n, text in enumerate(lines):
            try:
                line = from_json(text)
            except ValueError as error:
                if n == len(lines) - 1 and n:
                    return
                raise _no_trace(self.path, f"line {n + 1} is no JSON: {error}") from error
            if not isinstance(line, dict) or (n == 0 and type(line.get("rank")) is not int):
                raise _no_trace(self.path, "its first line does not name a rank")
            yield line

    def _run(
        self, plan: int, run: int, times: Sequence[int], left_at: str | None = None
    ) -> Iterator[_Row]:
        """Yield the events of a run, from its times.

        `left_at` marks the first event without a time, in a run that did not come to its end.
        """
        program, entries = self.plans[plan]
        flows: dict[int, int] = {}
        for n, entry in enumerate(entries[: len(times) - 1]):
            if entry is not None:
                yield program, run, self._event(entry, run, times[n], times[n + 1], flows)
        for n, start, stop in self.device if left_at is None else ():
            entry = entries[n]
            if entry is not None and times:
                lane = "device" if entry.lane == "host" else f"device {entry.lane}"
                on_device = replace(entry, lane=lane)
                at = times[0] + start, times[0] + stop
                yield program, run, self._event(on_device, run, *at, flows)
        self.device = []
        left = (e for e in entries[max(len(times) - 1, 0) :] if e is not None)
        entry = next(left, None)
        if entry is not None and times and left_at is not None:
            marked = replace(entry, name=f"{entry.name} ({left_at})")
            yield program, run, self._event(marked, run, times[-1], times[-1], flows)

    def _event(self, entry: Entry, run: int, start: int, stop: int, flows: dict[int, int]) -> Event:
        detail = entry.detail or f"run {run}"
        flow = flows.get(entry.handle) if entry.handle is not None else None
        if entry.part == "post":
            key: Hashable = entry.team
            if entry.to is not None or entry.of is not None:
                key = (self.rank, entry.to) if entry.to is not None else (entry.of, self.rank)
                detail = f"to {entry.to}" if entry.to is not None else f"from {entry.of}"
            is_pair = entry.to is not None or entry.of is not None
            number = self.counts[is_pair, key]
            self.counts[is_pair, key] += 1
            flow = self.flows.number((is_pair, key, number))
            flows.update(dict.fromkeys(entry.handles, flow))
        if not type(start) is type(stop) is int:
            raise TypeError(f"the times {shown(start)} and {shown(stop)}")
        return Event(
            rank=self.rank,
            lane=entry.lane,
            name=entry.name,
            start_ns=start + self._offset(start),
            stop_ns=stop + self._offset(stop),
            instruction=entry.instruction,
            flow=flow,
            part=entry.part,
            source=entry.source,
            nbytes=entry.nbytes,
            detail=detail,
        )


def _entry(fields: dict[str, Any]) -> Entry:
    lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
    entry = Entry(**{**fields, **lists})
    if not all(isinstance(x, str) for x in (entry.lane, entry.name, entry.detail, entry.part)):
        raise TypeError(f"the entry {shown(fields)}")
    return entry
