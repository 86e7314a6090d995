"""What torchrun shows of a rank that one waits for in vain, and the file that the report is in."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from helpers.shown_reports import not_said, shown
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
)

from mdfuse.errors import BackendError, ProgramError
from mdfuse.runtime.watch import reports
from mdfuse.runtime.watch.process import EXIT_STATUS
from mdfuse.runtime.watch.reports import tell_torchrun, untell_torchrun
from multirank.launchers import environment_of_ranks, torchrun

_JOB = """
import sys, time
import torch
import mdfuse as mf

comm = mf.init(backend="gloo")
mesh = mf.DeviceMesh([0, 1])
with mf.FusionDefinition("gather") as fd:
    x = fd.define_tensor([4], mesh=mesh, layout={"x": mf.Shard(0)})
    fd.add_output(fd.ops.set(x).on(mesh, {}))
gather = mf.compile(fd)
gather.run(torch.ones(2))
if comm.rank == 1:
    time.sleep(600)
if sys.argv[1] == "watchdog":  # a wait that no deadline of a library ends
    with comm._watch.waiting("what never comes"):
        time.sleep(600)
gather.run(torch.ones(2))
"""

#: How the wait of rank 0 ends -> the report's first line, and the exit status.
ENDS = {
    "error": (r"mdfuse\.errors\.BackendError: Allgather failed on rank 0", 1),
    "watchdog": (r"mdfuse\.errors\.BackendError: what never comes is not done", EXIT_STATUS),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_summary_has_the_report(end: str, tmp_path: Path) -> None:
    says, status = ENDS[end]
    script, reports = tmp_path / "job.py", tmp_path / "reports"
    script.write_text(_JOB)
    environment = environment_of_ranks() | {
        "MDFUSE_TIMEOUT_S": "2",
        "MDFUSE_REPORTS": str(reports),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = torchrun(2, [])
    done = subprocess.run(
        [*command[: command.index("-m", 2)], str(script), end],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    (file,) = reports.glob("rank0-*.txt")
    _, mark, summary = done.stderr.partition("Root Cause (first observed failure):")
    assert mark, done.stderr
    assert re.search(rf"exitcode\s*: {status} ", summary), summary
    assert re.search(says, summary), summary
    assert re.search(r"rank 1 .*host is at job\.py:\d+   time\.sleep\(600\)", summary), summary
    assert f"this report is in {file}" in summary
    if end == "error":
        assert not_said(shown()["test_reports"], done.stderr) == []
    assert re.match(says.replace(r"\.errors", ""), file.read_text())


_GUILTY_JOB = """
import sys, time
import torch
import mdfuse as mf
from torch.distributed.elastic.multiprocessing.errors import record

def main():
    comm = mf.init(backend="gloo")
    n, is_guilty = comm.size, comm.rank == int(sys.argv[2])
    mesh, x = mf.DeviceMesh([*range(n)]), torch.ones(2)
    with mf.FusionDefinition("gather") as fd:
        y = fd.define_tensor([2 * n], mesh=mesh, layout={"x": mf.Shard(0)})
        fd.add_output(fd.ops.set(y).on(mesh, {}))
    gather = mf.compile(fd)
    if is_guilty and sys.argv[1] == "in the first":
        gather.run(torch.ones(5))  # the guilty line
    gather.run(x)
    if is_guilty and sys.argv[1] == "refuse":
        gather.run(torch.ones(5))  # the guilty line
    if is_guilty and sys.argv[1] == "close first":
        try:
            raise ZeroDivisionError  # the guilty line
        finally:
            comm.close()
            time.sleep(1)
    if is_guilty:
        raise ZeroDivisionError  # the guilty line
    try:
        gather.run(x)
    except mf.MdfuseError as error:
        raise RuntimeError("the training failed") from error

(record(main) if len(sys.argv) > 3 else main)()
"""


@pytest.mark.parametrize(
    "arguments",
    [["raise", "1"], ["raise", "0", "record"], ["close first", "1"], ["in the first", "2"],
     ["refuse", "1", "record"]],
    ids=" ".join,
)  # fmt: skip
def test_the_root_cause_is_the_rank_that_raised(arguments: list[str], tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(_GUILTY_JOB)
    environment = environment_of_ranks() | {
        "MDFUSE_TIMEOUT_S": "20",
        "MDFUSE_REPORTS": str(tmp_path / "reports"),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = torchrun(3, [])
    done = subprocess.run(
        [*command[: command.index("-m", 2)], str(script), *arguments],
        capture_output=True, text=True, timeout=100, env=environment, check=False,
    )  # fmt: skip
    _, mark, root = done.stderr.partition("Root Cause (first observed failure):")
    assert mark and done.returncode, done.stderr
    assert re.search(rf"rank +: {arguments[1]} ", root), done.stderr
    assert "# the guilty line" in root, done.stderr


class Job:
    """The files of some ranks, and which of them torchrun calls the first."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.now = folder, patch, 1000.0
        for module in ("mdfuse.runtime.watch.reports", "torch.distributed.elastic.multiprocessing"):
            target = module if module.startswith("mdfuse") else f"{module}.errors.error_handler"
            patch.setattr(f"{target}.time.time", lambda: self.now)

    def on(self, rank: int) -> None:
        """Be this rank from now on."""
        self.patch.setattr(reports, "_told", [])
        self.patch.setenv("TORCHELASTIC_ERROR_FILE", str(self.file(rank)))

    def file(self, rank: int) -> Path:
        return self.folder / f"{rank}.json"

    def first(self, ranks: int, exits: int = 1) -> tuple[int, str]:
        failures = {
            rank: ProcessFailure(rank, 9000 + rank, exits, str(self.file(rank)))
            for rank in range(ranks)
        }
        rank, failure = ChildFailedError("job", failures).get_first_failure()
        assert not isinstance(failure.message, str)
        return rank, failure.message["message"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


FOLLOWS = ProgramError("@f broke off on rank 0: another rank refused it", follows=True)


def wrapped() -> Exception:
    try:
        try:
            raise FOLLOWS
        except ProgramError as error:
            raise RuntimeError("the training failed") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("late", [0.0, 0.4, 2.4])
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("error", [FOLLOWS, wrapped()], ids=["plain", "wrapped"])
def test_who_follows_is_dated_later(
    job: Job, late: float, is_recorded: bool, error: Exception
) -> None:
    """However soon it raises, and whether torch's `record` has written its file before."""
    for rank, raised, moment in (
        (2, ValueError("9"), 1000.5),
        (0, error, 1000.5),
        (1, error, 1001),
    ):
        job.on(rank)
        job.now = moment
        if is_recorded:
            ErrorHandler().record_exception(raised)
        job.now += late if rank == 2 else 0.0  # its file may be written last
        tell_torchrun(raised)
        tell_torchrun(raised)
    assert job.first(3) == (2, "ValueError: 9")
    dates = [json.loads(job.file(r).read_text())["message"]["extraInfo"] for r in range(3)]
    assert all(d["timestamp"].isdecimal() and d["py_callstack"] for d in dates)


def test_what_went_wrong_first_keeps_its_date(job: Job) -> None:
    """A rank that refused a run is the first one, whatever it ends by later."""
    job.on(1)
    tell_torchrun(ProgramError("%x has shape (5,)"))
    job.on(0)
    job.now = 1000.9
    tell_torchrun(FOLLOWS)
    job.patch.setenv("TORCHELASTIC_ERROR_FILE", str(job.file(1)))
    job.now = 1060.0
    tell_torchrun(BackendError("rank 1 runs no program that communicates any more"))
    rank, what = job.first(2)
    assert rank == 1 and what.startswith("BackendError: rank 1 runs no program")


def test_what_is_over_is_taken_back(job: Job) -> None:
    job.on(0)
    ErrorHandler().record_exception(ValueError("of torch's"))
    untell_torchrun()
    assert job.file(0).exists()
    job.on(1)
    tell_torchrun(KeyboardInterrupt())
    tell_torchrun(None)
    assert not job.file(1).exists()
    tell_torchrun(ValueError("7"))
    assert [x.name for x in job.folder.glob("1*")] == ["1.json"]
    untell_torchrun()
    untell_torchrun()
    assert not job.file(1).exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"message": "a text"}', '{"message": {"extraInfo": 3}}']
)
def test_a_file_that_holds_something_else(job: Job, text: str) -> None:
    job.on(0)
    job.file(0).write_text(text)
    tell_torchrun(ValueError("7"))
    assert job.first(1) == (0, "ValueError: 7")


def test_a_file_that_cannot_be_written(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "_told", [])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(job.folder / "none" / "file.json"))
    tell_torchrun(ValueError("7"))
    assert "the launcher's file cannot be written" in caplog.text
