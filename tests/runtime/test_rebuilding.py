"""Ranks die while they train, and the others go on: with the losses of a run that nobody disturbed.

Ranks are forks (`tests/helpers/survivor_job.py`), and jobs wait for deadlines beside each other.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.shown_reports import not_said
from helpers.shown_reports import shown as shown_reports
from helpers.survivor_job import KINDS, STEPS, Fault, Job, undisturbed

import mdfuse as mf
from mdfuse.bootstrap import Launch
from mdfuse.runtime.membership import Membership
from mdfuse.runtime.rebuilding import EXCLUDED_STATUS, _check_launch

TESTS = Path(__file__).resolve().parent.parent
SERVERS = 2


def drawn_job(number: int) -> Job:
    """One or two ranks are killed, between two steps or in one."""
    draw = random.Random(number)
    ranks, kind = draw.choice([4, 4, 4, 8]), draw.choice(["dp", "tp", "hsdp", "fsdp"])
    places, version = draw.sample(range(ranks), draw.choice([1, 1, 2])), draw.randint(1, STEPS - 2)
    if len(KINDS[kind]) and {p // 2 for p in places} == {0, 1} and ranks == 4:
        places = places[:1]  # else no slice is left
    faults = [
        Fault(r, version, draw.choice(["between", "in"]), delay_s=draw.uniform(0, 0.004))
        for r in places
    ]
    double = draw.random() < 0.5 and kind != "fsdp"
    return Job(ranks, faults, kind, double_buffer=double, save_at=-1 if double else 0)


SPECIAL = {
    "stopped": Job(4, [Fault(2, 3, deed="stop")]),
    "slow": Job(4, [Fault(1, 3), Fault(3, 3, "rebuild", "slow", delay_s=1.0)], is_kept=False),
    "in a rebuild": Job(
        4, [Fault(1, 3), Fault(2, 3, "rebuild", delay_s=1.0)], double_buffer=True
    ),
    "stopped, and another one killed": Job(
        4, [Fault(1, 2, "in", "stop"), Fault(3, 2, "in")], double_buffer=True
    ),
    "twice": Job(4, [Fault(0, 2), Fault(3, 5)], double_buffer=True),
    "in a save": Job(4, [Fault(1, 4, "save", delay_s=0.002)], save_at=4),
    "in a save beside steps": Job(
        4, [Fault(1, 4, "saved", delay_s=0.001)], save_at=4, save_waits=False, double_buffer=True
    ),
    # a new process waits while the others rebuild and compile: on a busy machine, more than 5 s
    "joined": Job(4, [Fault(2, 3)], kind="imported", join=True, double_buffer=True,
                  timeout_s=60.0),
    "symmetric": Job(4, [Fault(2, 3, "in", delay_s=0.001)], kind="hsdp", backend="symmetric",
                     double_buffer=True),
    "an imported model": Job(4, [Fault(1, 3)], kind="imported"),
    "ucx": Job(4, [Fault(1, 3)], kind="hsdp", backend="ucx"),
}  # fmt: skip
#: Some are run, others in another commit; with --whole all, and a hundred moments.
JOBS = {
    **dict([*SPECIAL.items()][n] for n in sampling.window(len(SPECIAL), 3)),
    **{f"drawn {n}": drawn_job(n) for n in sampling.window(104, 13)},
}


class JobServer:
    """A process that runs one job after the other."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.survivor_job", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"},
        )

    def run(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(job.line() + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._process.stdout.readline())
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The accounts of the jobs that are asked for, which run beside each other."""
    asked = [item.callspec.params["name"] for item in request.session.items
             if getattr(item, "callspec", None) and "name" in item.callspec.params
             and item.path == Path(__file__).resolve()]  # fmt: skip
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # whose fsync takes no time
    with ExitStack() as stack:
        servers: SimpleQueue[JobServer] = SimpleQueue()
        for _ in range(SERVERS):
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=memory))
            servers.put(server := JobServer(Path(folder)))
            stack.callback(server.close)

        def run(job: Job) -> dict[str, Any]:
            server = servers.get()
            result = server.run(job)
            servers.put(server)
            return result

        pool = stack.enter_context(ThreadPoolExecutor(SERVERS))
        yield {name: pool.submit(run, JOBS[name]) for name in dict.fromkeys(asked)}


@pytest.mark.parametrize("name", JOBS)
def test_survivors_go_on(name: str, results: dict[str, Future[dict[str, Any]]]) -> None:
    """The others end well, and each loss is that of plain torch on one device."""
    job, result = JOBS[name], results[name].result()
    shown = f"{job}\n" + "\n".join(f"{k}: {v}" for k, v in result["outputs"].items())
    left = {f.rank: -9 if f.deed == "kill" else EXCLUDED_STATUS for f in job.faults
            if f.deed != "slow"}  # fmt: skip
    statuses = {str(r): left.get(r, 0) for r in range(job.ranks)}
    statuses |= {f"{r}.new": 0 for r in left if job.join}
    assert result["statuses"] == statuses, shown
    if name == "stopped":
        assert not_said(shown_reports()["test_rebuilding"], result["outputs"]["2"]) == [], shown
    assert result["left"] == [] and not any(x["left"] for x in result["said"].values()), shown
    losses, done = undisturbed(), set()
    for rank, said in result["said"].items():
        for version, loss in said["losses"].items():
            assert loss == pytest.approx(losses[int(version)], abs=1e-6), f"{rank}\n{shown}"
            done.add(int(version))
        lost = [r for rebuild in said["rebuilds"] for r in rebuild["lost"]]
        assert len(lost) == (0 if rank.endswith("new") else len(left)), shown
        if job.double_buffer:  # at most one step is lost
            assert all(x["version"] >= job.faults[0].version for x in said["rebuilds"]), shown
    assert done == {*range(STEPS)}, shown
    if job.join:
        assert {*result["said"]["2.new"]["losses"]} == {str(STEPS - 2), str(STEPS - 1)}, shown


@pytest.mark.parametrize(("deed", "status"), [("kill", -9), ("stop", 0)])
def test_the_store_goes_with_the_rank_that_kept_it(deed: str, status: int, tmp_path: Path) -> None:
    """Nobody can agree then, and the error says so; woken when all have ended, it is alone."""
    server = JobServer(tmp_path)
    result = server.run(Job(3, [Fault(0, 2, deed=deed)], is_kept=False))
    server.close()
    assert result["statuses"] == {"0": status, "1": 1, "2": 1}
    for rank in ("1", "2"):
        assert "the store that the ranks met in does not answer" in result["outputs"][rank]
        assert "mdfuse launch" in result["outputs"][rank]


@pytest.mark.parametrize(
    ("launch", "variables", "says"),
    [
        ("mpirun", {}, "mpirun ends all ranks once one of them has died"),
        ("srun", {}, "srun ends all ranks"),
        ("torchrun", {"TORCHELASTIC_RUN_ID": "x"}, "ends its other ranks 0.1 s after one dies"),
    ],
)
def test_launchers_that_end_survivors_are_refused(
    launch: str, variables: dict[str, str], says: str
) -> None:
    of = Launch(name=launch, rank=1, size=4, local_rank=1, why="it said so", local_size=4)
    with pytest.raises(mf.BackendError, match=says):
        _check_launch(of, variables)


def test_one_agent_for_each_rank_is_none_of_them() -> None:
    alone = Launch(name="torchrun", rank=1, size=4, local_rank=0, why="it said so", local_size=1)
    _check_launch(alone, {"TORCHELASTIC_RUN_ID": "x"})


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(mf.ProgramError, match="rebuild without an error"):
        mf.rebuild()
    with pytest.raises(mf.ProgramError, match="rebuild after ValueError"):
        mf.rebuild(ValueError("no"))  # type: ignore[arg-type]
    with pytest.raises(mf.ProgramError, match=r"settle_s=-1"):
        mf.rebuild(mf.BackendError("gone"), settle_s=-1)
    with pytest.raises(mf.ProgramError, match=r"rebuild\(join=True\) after BackendError"):
        mf.rebuild(mf.BackendError("gone"), join=True)
    mf.init()
    with pytest.raises(mf.BackendError, match="rebuild of a communicator of one rank"):
        mf.rebuild(mf.BackendError("gone"))


def test_ranks_and_processes() -> None:
    """A process keeps its place; one that joins in the place of another is not that one."""
    before = ((0, 0), (1, 0), (2, 0))
    now = Membership(((0, 0), (1, 3), (2, 0)), before, epoch=3)
    assert now.lost == (1,) and [now.new_rank(r) for r in (0, 1, 2, 9)] == [0, None, 2, None]
    assert [now.old_rank(r) for r in range(3)] == [0, None, 2]
    assert torch.tensor(Membership.first(2).members).tolist() == [[0, 0], [1, 0]]
