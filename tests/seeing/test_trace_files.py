"""Trace files: what ranks write, a JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mdfuse as mf
from mdfuse.seeing.trace_files import Entry, TraceFile, trace_file


def lines(file: TraceFile) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.path.read_text().splitlines()]


def test_times_are_one_more_than_entries(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "rank0.jsonl", 0)
    stamps = file.stamps("p", [Entry(name="a"), None, Entry(name="b", part="wait", handle=3)])
    for is_done in (True, False):
        stamps.begin()
        stamps.note()
        stamps.flush()
        stamps.note()
        stamps.end(is_done)
    head, plan, *runs = lines(file)
    assert head["rank"] == 0
    assert plan["entries"] == [{"name": "a"}, None, {"name": "b", "part": "wait", "handle": 3}]
    assert [(r["run"], r["first"], len(r["ns"])) for r in runs if "ns" in r] == [
        (0, 0, 2), (0, 2, 2), (1, 0, 2), (1, 2, 2),
    ]  # fmt: skip
    assert [r["end"] for r in runs if "end" in r] == [0], "the second run did not end"
    for run in (0, 1):
        times = [t for r in runs if r.get("run") == run for t in r["ns"]]
        assert times == sorted(times)


def test_what_comes_before_a_wait_is_in_the_file_when_it_begins(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "rank0.jsonl", 0)
    stamps = file.stamps("p", [Entry(name="a"), None, Entry(name="wait")])
    stamps.begin()
    stamps.note()
    assert len(lines(file)) == 2
    stamps.flush()
    assert len(lines(file)[-1]["ns"]) == 2


def test_a_process_has_one_file_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "spüren" / "hier"
    file = trace_file(str(folder), 3, 4)
    assert trace_file(str(folder), 3, 4) is file
    assert file.path == folder / "rank3.jsonl"
    file.path.unlink()
    assert trace_file(str(folder), 3, 4) is not file


@pytest.mark.parametrize("make", ["file", "null"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, make: str) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file") if make == "file" else "a\0b"
    with pytest.raises(mf.ProgramError, match="rank 2 cannot write a trace into"):
        trace_file(folder, 2, 4)


def test_files_of_a_larger_job_before_are_removed(tmp_path: Path) -> None:
    for name in ("rank1", "rank2", "rank11", "ranks", "rankx"):
        (tmp_path / f"{name}.jsonl").write_text('{"rank": 2}\n')
    trace_file(str(tmp_path), 0, 2)
    found = sorted(p.stem for p in tmp_path.iterdir())
    assert found == ["rank0", "rank1", "ranks", "rankx"]
