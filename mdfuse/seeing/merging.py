"""Merging: traces of runs, timelines and traces of torch's profiler, in one file by one clock."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdfuse.errors import ProgramError
from mdfuse.seeing.perfetto import Record, records
from mdfuse.seeing.traces import files_of, read_files, writer_of

#: Each trace has processes of its own: their numbers begin with a multiple of this.
_PIDS = 100_000

#: host and process -> rank; None where several ranks claim it.
_Writers = Mapping[tuple[str, int], int | None]


def merge(paths: Sequence[str | Path], out: str | Path) -> int:
    """Merge traces into one file for https://ui.perfetto.dev; return how many records it has.

    Folders and files of different ranks are one job, as where each host has a folder; a rank that
    comes again begins another one.

    Args:
        paths: folders and files of traced runs; Chrome trace JSON, packed or not, as torch's
            profiler and `Timeline.to_perfetto` write it. Traces without a clock, as timelines,
            begin with the first of the others.
        out: the file, which is replaced.

    Raises:
        ProgramError: one of them is no trace, or is the output file.
        OSError: the file cannot be written.
    """
    given = [*map(Path, paths)]
    _check_apart(given, Path(out))
    runs = [p for p in given if p.is_dir() or p.suffix == ".jsonl"]
    jobs, writers = _jobs(runs)
    events_of = [read_files([*job.values()]) for job in jobs]
    loaded = [_loaded(p) for p in given if p not in runs]
    starts = [events[0].start_ns for events in events_of if events]
    starts += [c.begin_ns for c in loaded if c.begin_ns is not None]
    base = min(starts, default=0)
    rows: list[Record] = []
    titles = _titles([job[min(job)].resolve().parent for job in jobs]) if len(jobs) > 1 else [None]
    for n, (events, title) in enumerate(zip(events_of, titles, strict=False)):
        rows += _apart(records(events, base_ns=base), n, title)
    names = _titles([c.path for c in loaded])
    for n, (chrome, name) in enumerate(zip(loaded, names, strict=True), len(jobs)):
        rank = chrome.rank(writers)
        title = name if rank is None else f"rank {rank}, {name}"
        rows += _apart(chrome.since(base), n, title, rank)
    text = {"traceEvents": rows, "displayTimeUnit": "ns", "baseTimeNanoseconds": base}
    Path(out).write_text(json.dumps(text), encoding="utf-8")
    return len(rows)


def _check_apart(paths: Sequence[Path], out: Path) -> None:
    """Check that no trace is written over."""
    for path in paths:
        if path.resolve() == out.resolve():
            raise ProgramError(
                f"{out} is to be read and to be written",
                because="the merged trace would replace one of those that it is made of",
                hint="pass another file with -o",
            )


# -- traces of runs --------------------------------------------------------------------------------


def _jobs(paths: Sequence[Path]) -> tuple[list[dict[int, Path]], _Writers]:
    """Return the files of each job by rank, and which rank each process was."""
    jobs: list[dict[int, Path]] = []
    writers: dict[tuple[str, int], int | None] = {}
    for path in paths:
        files: dict[int, Path] = {}
        for file in files_of(path):
            rank, where = writer_of(file)
            files[rank] = file
            if where is not None:
                writers[where] = rank if writers.get(where, rank) == rank else None
        job = next((j for j in jobs if not j.keys() & files.keys()), None)
        if job is None:
            jobs.append(files)
        else:
            job.update(files)
    return jobs, writers


# -- other traces ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chrome:
    """A Chrome trace.

    Attributes:
        path: of its file.
        rows: its records.
        base_ns: unix time from which its times count; None: it has no clock.
        host: on which it was written, if it says so.
    """

    path: Path
    rows: list[Record]
    base_ns: int | None
    host: str | None

    @property
    def _first_us(self) -> float:
        """The time of its first record that has a duration, or is an instant."""
        return min((r["ts"] for r in self.rows if "ts" in r and r.get("ph") != "M"), default=0.0)

    @property
    def begin_ns(self) -> int | None:
        """Unix time of its first record: torch's base is weeks before it."""
        return None if self.base_ns is None else self.base_ns + int(self._first_us * 1e3)

    def since(self, base_ns: int) -> list[Record]:
        """Return the records, with times from a base."""
        by = -self._first_us if self.base_ns is None else (self.base_ns - base_ns) / 1e3
        return [{**r, "ts": r["ts"] + by} if "ts" in r else dict(r) for r in self.rows]

    def rank(self, writers: _Writers) -> int | None:
        """Return the rank whose process it shows; None: it is not known."""
        labels = (r for r in self.rows if r.get("name") == "process_labels")
        hosts = [r.get("pid") for r in labels if r.get("args", {}).get("labels") == "CPU"]
        ranks = {writers.get((self.host or "", pid)) for pid in hosts if isinstance(pid, int)}
        return ranks.pop() if len(ranks) == 1 else None


#: The latest time of a record: some thirty thousand years.
_LATEST_US = 1e18

#: Key of a record -> the types of its value, and these in words.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "ts": ((int, float), "number"),
    "pid": ((int, float, str), "number or name"),
    "args": ((dict,), "object"),
}


def _loaded(path: Path) -> _Chrome:
    """Return a Chrome trace."""
    try:
        packed = path.read_bytes()
        text = gzip.decompress(packed) if packed.startswith(b"\x1f\x8b") else packed
        parsed = json.loads(text)
        rows = parsed["traceEvents"] if isinstance(parsed, dict) else parsed
        if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
            raise ValueError("its traceEvents are no list of records")
        for key, (kinds, what) in _KINDS.items():
            if any(key in r and not isinstance(r[key], kinds) for r in rows):
                raise ValueError(f"a record's {key} is no {what}")
        if not all(abs(r["ts"]) < _LATEST_US for r in rows if "ts" in r):
            raise ValueError("a record's ts is no time")
        about = parsed if isinstance(parsed, dict) else {}
        begin = about.get("baseTimeNanoseconds")
        if not isinstance(begin, int | None) or abs(begin or 0) >= 1 << 63:
            raise ValueError("its baseTimeNanoseconds is no integer of 64 bits")
    except (OSError, EOFError, ValueError, KeyError, RecursionError, zlib.error) as error:
        raise ProgramError(
            f"{path} is no trace",
            because=f"no key {error}" if isinstance(error, KeyError) else str(error),
            hint="pass folders of traced runs, or Chrome trace JSON",
        ) from error
    return _Chrome(path, rows, begin, about.get("host_name"))


def _titles(paths: Sequence[Path]) -> list[str]:
    """Return the names of files without their ends, with the folder where several are alike."""
    stems = [p.name.split(".json")[0] for p in paths]
    alike = Counter(stems)
    return [
        f"{p.resolve().parent.name}/{stem}" if alike[stem] > 1 else stem
        for p, stem in zip(paths, stems, strict=True)
    ]


def _apart(
    rows: Sequence[Record], n: int, title: str | None, rank: int | None = None
) -> list[Record]:
    """Renumber and rename the processes and the flows of the n-th trace.

    The processes of a known rank are shown beside that rank.
    """
    pids: dict[Any, int] = {}
    renumbered = []
    for r in rows:
        if "pid" in r and (n or title is not None):
            r = {**r, "pid": n * _PIDS + pids.setdefault(r["pid"], len(pids))}
        if "id" in r and n:
            r = {**r, "id": f"{n}/{r['id']}"}
        if r.get("name") == "process_name" and title is not None:
            r = {**r, "args": {"name": f"{r.get('args', {}).get('name', '')} ({title})"}}
        if r.get("name") == "process_sort_index" and rank is not None:
            r = {**r, "args": {"sort_index": rank}}
        renumbered.append(r)
    return renumbered
