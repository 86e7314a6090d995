"""Trace files: what ranks write, a JSON object per line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.full_disk import room

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


# -- full disks ----------------------------------------------------------------------------------


def test_a_full_disk_ends_tracing_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was written until then can be read, a torn line at its end."""
    with mf.FusionDefinition("traced") as fd:
        x = fd.define_tensor([4], mesh=mf.DeviceMesh([0]))
        fd.add_output(fd.ops.exp(x) * 2)
    program = mf.compile(fd, mf.Options(trace=str(tmp_path)))
    program.run(torch.zeros(4))
    file = tmp_path / "rank0.jsonl"
    with room(file.stat().st_size + 20):
        for _ in range(3):
            (y,) = program.run(torch.zeros(4))
    assert torch.equal(y, torch.full((4,), 2.0))

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "mdfuse.trace"]

    why = "cannot be written: [Errno 27] File too large"
    assert said() == [f"rank 0 traces no more: {file} {why}"]
    assert file.stat().st_size == len(file.read_bytes()) and not file.read_text().endswith("\n")
    size = file.stat().st_size
    program.run(torch.zeros(4))  # also once there is room again: what lacks a part is no trace
    with mf.FusionDefinition("another") as fd:
        x = fd.define_tensor([4], mesh=mf.DeviceMesh([0]))
        fd.add_output(x + 1)
    mf.compile(fd, mf.Options(trace=str(tmp_path))).run(torch.zeros(4))
    assert file.stat().st_size == size
    events = mf.seeing.read_trace(tmp_path)
    assert next(e.detail for e in events if e.name == "%t = exp") == "run 0"
    mf.init().close()
    assert len(said()) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_disk_without_room_for_the_first_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        file = TraceFile(tmp_path / "rank3.jsonl", 3)
    assert file.is_over
    stamps = file.stamps("p", [Entry(name="a")])
    for _ in range(2):
        stamps.begin()
        stamps.flush()
        stamps.end(True)
    assert [r.getMessage()[:23] for r in caplog.records] == ["rank 3 traces no more: "]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_file_that_cannot_be_opened(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk ends tracing; what is named wrongly is refused."""
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(number, "no")))
    if number == errno.ENOSPC:
        assert trace_file(str(tmp_path / "a"), 0, 1).is_over and len(caplog.records) == 1
    else:
        with pytest.raises(mf.ProgramError, match="cannot write a trace into"):
            trace_file(str(tmp_path / "a"), 0, 1)


def test_lines_that_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    file = TraceFile(tmp_path / "rank0.jsonl", 0)
    file.clock(1, 2)
    assert [*map(len, lines(file))] == [3, 3]
