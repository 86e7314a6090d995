"""A test's verdict in its world, and how it travels from the ranks to their host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from multirank.process import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a world says of one test.

    Attributes:
        test: the test's node id.
        failure: what went wrong on which rank, or None where the test passed on every rank.
        seconds: the time from the test's start to the agreement on it.
    """

    test: str
    failure: str | None
    seconds: float = 0.0

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """The reports of the three phases that pytest's reporters expect of every test."""
        outcome = "passed" if self.failure is None else "failed"
        return [
            _report(item, "setup"),
            _report(item, "call", outcome, self.failure, self.seconds),
            _report(item, "teardown"),
        ]


def _report(
    item: pytest.Item,
    when: str,
    outcome: str = "passed",
    failure: str | None = None,
    seconds: float = 0.0,
) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=failure,
        when=when,  # type: ignore[arg-type]
        duration=seconds,
    )


class VerdictWriter:
    """One rank's lines in the reports' folder; without a folder it writes nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file = folder and folder / f"rank{rank}.jsonl"

    def exists(self, process: Process) -> None:
        """Tell the host which process this rank is."""
        if self._file is not None:
            self._file.with_suffix(".process").write_text(process.to_text())

    def started(self, test: str) -> None:
        self._write({"started": test})

    def settled(self, verdict: Verdict) -> None:
        self._write({"settled": asdict(verdict)})

    def _write(self, line: dict[str, object]) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


class VerdictReader:
    """Reads the lines that the ranks have added to a folder since the last time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def processes(self) -> list[Process]:
        """The processes of the ranks that have come up."""
        texts = [path.read_text() for path in self._folder.glob("rank*.process")]
        found = [Process.from_text(text) for text in texts if text]
        return sorted(found, key=lambda process: process.rank)

    def new(self) -> Iterator[str | Verdict]:
        """Yield the name of each test that was started, and each verdict."""
        for path in sorted(self._folder.glob("rank*.jsonl")):
            start = self._read.get(path, 0)
            lines = path.read_bytes()[start:]
            whole = lines[: lines.rfind(b"\n") + 1]  # a line may be only half written
            self._read[path] = start + len(whole)
            for line in map(json.loads, whole.splitlines()):
                yield Verdict(**line["settled"]) if "settled" in line else line["started"]
