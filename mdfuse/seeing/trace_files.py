"""Trace files: the times of a traced run, written by each rank, a JSON object per line.

A file is never closed in the middle of a line, so the lines of a rank that died can be read. Its
lines, in any order but for the first:

    {"rank": 1, "host": "node0"}                                  which rank it is
    {"clock": 1790000000123, "error": 40000}                      unix time - clock, in ns, and ±
    {"plan": 0, "program": "mlp", "entries": [{…}, null, …]}      what the times are of
    {"run": 3, "plan": 0, "first": 2, "ns": [17, 19, …]}          times from the third one on
    {"run": 3, "plan": 0, "device": [[0, 5, 9], …]}               on a GPU: entry, start, stop
    {"end": 3, "plan": 0}                                         the run came to its end
    {"broken": 4, "plan": 0}                                      the run broke off, by an error

The times of a run are one more than its entries, each of which goes from one time to the next; null
stands for the writing itself. Times of a GPU count from the first time of the run.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from mdfuse.errors import ProgramError
from mdfuse.seeing.events import Part

_LOG = logging.getLogger("mdfuse.trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The work of a plan between two times.

    Attributes:
        name: as in events.
        lane: likewise.
        part: likewise.
        instruction: likewise.
        source: likewise.
        nbytes: likewise, for a post.
        detail: likewise.
        handle: the handle that a wait waits for.
        handles: of a post, or of several at once, for later waits.
        team: the ranks that take part in the posted communication.
        to: the rank that it is sent to, where that is one and nothing is received.
        of: the rank that it is received from, where that is one and nothing is sent.
    """

    name: str
    lane: str = "host"
    part: Part = "work"
    instruction: int = -1
    source: str = ""
    nbytes: int = 0
    detail: str = ""
    handle: int | None = None
    handles: tuple[int, ...] = ()
    team: tuple[int, ...] = ()
    to: int | None = None
    of: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are set."""
        blank = Entry(name="")
        return {k: v for k, v in asdict(self).items() if v != getattr(blank, k)}


#: Errors of a system without room for more.
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(slots=True)
class TraceFile:
    """The trace file of this rank in a folder, which is made.

    Where it cannot be written any more, as on a full disk, it warns once, and notes nothing from
    then on: runs go on.

    Args:
        path: of the file.
        rank: this rank.

    Raises:
        OSError: it cannot be opened, for another reason than that the disk is full.
    """

    path: Path
    rank: int
    plans: count[int] = field(default_factory=count)
    _file: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, flags, 0o666)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._end(error)
        self.write({"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()})

    @property
    def is_over(self) -> bool:
        """True once the file could not be written any more."""
        return self._file is None

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record as a line."""
        self.write_text(json.dumps(record, separators=(",", ":")) + "\n")

    def write_text(self, text: str) -> None:
        """Write lines."""
        if self._file is None:
            return
        left = text.encode()
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            file, self._file = self._file, None
            os.close(file)
            self._end(error)

    def _end(self, error: OSError) -> None:
        _LOG.warning(
            "rank %d traces no more: %s cannot be written: %s", self.rank, self.path, error
        )

    def clock(self, offset_ns: int, error_ns: int) -> None:
        """Note the offset from this rank's clock to the unix time of rank 0."""
        self.write({"clock": offset_ns, "error": error_ns, "at": perf_counter_ns()})

    def stamps(self, program: str, entries: Sequence[Entry | None]) -> Stamps:
        """Note the entries of a plan, and return the stamps that its runs call between lines."""
        number = next(self.plans)
        rows = [e.as_json() if e is not None else None for e in entries]
        self.write({"plan": number, "program": program, "entries": rows})
        return Stamps(self, number)


class Stamps:
    """Notes the times of the runs of a plan, and writes them."""

    def __init__(self, file: TraceFile, plan: int) -> None:
        self._file, self._plan = file, plan
        self._run, self._first = -1, 0
        self._times: list[int] = []
        self.note = _note(self._times)

    def begin(self) -> None:
        """Begin a run."""
        self._run += 1
        self._first = 0
        self._times.clear()
        self.note()

    def flush(self) -> None:
        """Write all notes, before something that may never end; the writing is an entry, too."""
        self._write("")
        self.note()

    def end(self, is_done: bool, device: Sequence[tuple[int, int, int]] = ()) -> None:
        """End a run, which came to its end or broke off.

        Args:
            is_done: whether it came to its end.
            device: (number of an entry, start, stop) of work on a GPU, ns from the run's begin.
        """
        lines = ""
        if device:
            row = json.dumps(device, separators=(",", ":"))
            lines = f'{{"run":{self._run},"plan":{self._plan},"device":{row}}}\n'
        how = "end" if is_done else "broken"
        lines += f'{{"{how}":{self._run},"plan":{self._plan}}}\n'
        self._write(lines)

    def _write(self, text: str) -> None:
        if self._file.is_over:
            self._times.clear()
            return
        times = ",".join(map(str, self._times))
        head = f'{{"run":{self._run},"plan":{self._plan},"first":{self._first}'
        self._first += len(self._times)
        self._times.clear()
        self._file.write_text(f'{head},"ns":[{times}]}}\n{text}')


def _note(times: list[int], now: Callable[[], int] = perf_counter_ns) -> Callable[[], None]:
    """Return a function that notes the time; it binds all that it needs, as it is called often."""
    append = times.append

    def stamp() -> None:
        append(now())

    return stamp


#: folder, rank -> the file, which all programs of the process share.
_FILES: dict[tuple[str, int], TraceFile] = {}


def trace_file(folder: str, rank: int, ranks: int) -> TraceFile:
    """Return the trace file of a rank in a folder, which is made where it is not there.

    The first call in a process empties the file; that of rank 0 removes the files that an earlier
    job of more ranks left.

    Raises:
        ProgramError: it cannot be written, for another reason than that the disk is full.
    """
    key = os.path.abspath(folder), rank
    if key not in _FILES or not _FILES[key].path.exists():
        try:
            _FILES[key] = TraceFile(Path(folder) / f"rank{rank}.jsonl", rank)
            if rank == 0:
                _remove_from(Path(folder), ranks)
        except (OSError, ValueError) as error:
            raise ProgramError(
                f"rank {rank} cannot write a trace into {folder!r}",
                because=str(error),
                hint="Options(trace=) or MDFUSE_TRACE names a folder that all ranks can write into",
            ) from error
    return _FILES[key]


def _remove_from(folder: Path, first: int) -> None:
    """Remove the files of a rank and of those above it."""
    for path in folder.glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal() and int(number) >= first:
            path.unlink()
