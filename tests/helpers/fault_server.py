"""Starts the ranks of one small job after the other, each a fork that has torch imported already.

Reads lines of JSON. {"script", "ranks", "folder", "environment", "arguments", "mpirun"} starts a
job, whose ranks run the script as their main program; by mpirun, where there is such a command.
{"wait": seconds, "without": ranks} ends it and gives the exit statuses, None for ranks that had to
be killed then, and behind those of the ranks that of mpirun.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fault_mpirun import Mpirun

import mdfuse as mf
import mdfuse.runtime.communicator


def start(job: dict[str, Any], mpirun: Mpirun | None) -> tuple[list[int], int | None]:
    """The processes; in each of them, its rank."""
    pids = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            by_hand = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            become(rank, job, mpirun.environments[rank] if mpirun else by_hand)
            return [], rank
        pids.append(pid)
    return pids, None


def start_mpirun(job: dict[str, Any]) -> Mpirun | None:
    """mpirun with stand-ins for the ranks, where the job wants it."""
    if not job["mpirun"]:
        return None
    return Mpirun(
        job["mpirun"],
        ranks=job["ranks"],
        environment={**os.environ, **job["environment"]},
        out=Path(job["folder"]) / "out.mpirun",
    )


def become(rank: int, job: dict[str, Any], own: dict[str, str]) -> None:
    """Make this process look as one that a launcher started."""
    os.chdir(job["folder"])
    out = os.open(f"out.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (out, 1), (out, 2)):
        os.dup2(old, new)
    os.environ.update(job["environment"] | own)
    sys.argv = [job["script"], *job["arguments"]]


def wait(
    pids: list[int], mpirun: Mpirun | None, seconds: float, without: list[int]
) -> list[int | None]:
    """Exit statuses, negative for signals, of what ended in time; the rest is killed.

    Args:
        pids: the processes, by rank.
        mpirun: ends ranks, too; its own status is the last one.
        seconds: how long to wait.
        without: ranks that are not waited for.
    """
    deadline, found = time.monotonic() + seconds, dict[int, int]()
    wanted = set(range(len(pids))) - set(without)
    while not wanted <= found.keys() and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank in mpirun.ended() if mpirun else ():
            for number in (signal.SIGCONT, signal.SIGTERM):  # as mpirun does
                os.kill(pids[rank], number)
        found |= reap(pids, mpirun, set(range(len(pids))) - found.keys(), os.WNOHANG)
    late = set(range(len(pids))) - found.keys()
    for rank in late:
        os.kill(pids[rank], signal.SIGKILL)
    reap(pids, mpirun, late, 0)
    statuses = [found.get(rank) for rank in range(len(pids))]
    return [*statuses, mpirun.wait()] if mpirun else statuses


def reap(pids: list[int], mpirun: Mpirun | None, ranks: set[int], options: int) -> dict[int, int]:
    """The exit statuses of those of these ranks that have ended."""
    found = {}
    for rank in ranks:
        pid, status = os.waitpid(pids[rank], options)
        if pid:
            found[rank] = os.waitstatus_to_exitcode(status)
            if mpirun:
                mpirun.tell(rank, found[rank])
    return found


def serve() -> dict[str, Any]:
    """Serve until the input ends; return in the ranks, with their job."""
    pids: list[int] = []
    mpirun: Mpirun | None = None
    for line in sys.stdin:
        job = json.loads(line)
        answer: object = None
        if "wait" in job:
            answer = wait(pids, mpirun, job["wait"], job["without"])
        else:
            mpirun = start_mpirun(job)
            pids, rank = start(job, mpirun)
            if rank is not None:
                return dict(job)
        print(json.dumps(answer), flush=True)
    sys.exit()


def import_all() -> None:
    """Import, once for all ranks, what is imported where it is first used.

    That is most of mdfuse, and with torch's rules for shapes its compiler: seconds in each process.
    """
    program = None
    for mesh in (mf.DeviceMesh([0, 1]), mf.DeviceMesh([0, 1, 2])):
        with mf.FusionDefinition("first") as fd:
            x = fd.define_tensor([6], mesh=mesh, layout={"x": mf.Shard(0)})
            y = fd.ops.set(fd.ops.sum(x, dims=[0])).on(mesh, {})
            fd.add_output(y)
        program = mf.compile(fd)
    assert program is not None
    mf.simulate(program, [torch.ones(6)])


import_all()
gc.freeze()  # what is imported stays shared, and costs the ranks nothing when they end
job = serve()
script = Path(job["script"])
exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
