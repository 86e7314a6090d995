"""What torchrun shows of a rank that one waits for in vain, and the file that the report is in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from helpers.shown_reports import not_said, shown

from mdfuse.runtime.watch.watch import EXIT_STATUS
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
