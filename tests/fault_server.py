"""Starts the ranks of one small job after the other, each a fork that has torch imported already.

Reads lines of JSON. {"script", "ranks", "folder", "environment", "arguments"} starts a job, whose
ranks run the script as their main program. {"wait": seconds, "without": ranks} ends it and gives
the exit statuses, None for ranks that had to be killed then.
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

import torch  # noqa: F401  imported once, for all

import mdfuse.runtime.communicator  # noqa: F401


def start(job: dict[str, Any]) -> tuple[list[int], int | None]:
    """The processes; in each of them, its rank."""
    pids = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            return [], rank
        pids.append(pid)
    return pids, None


def become(rank: int, job: dict[str, Any]) -> None:
    """Make this process look as one that a launcher started."""
    os.chdir(job["folder"])
    out = os.open(f"out.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (out, 1), (out, 2)):
        os.dup2(old, new)
    os.environ.update(job["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = [job["script"], *job["arguments"]]


def wait(pids: list[int], seconds: float, without: list[int]) -> list[int | None]:
    """Exit statuses, negative for signals, of what ended in time; the rest is killed.

    Args:
        pids: the processes, by rank.
        seconds: how long to wait.
        without: ranks that are not waited for.
    """
    deadline, found = time.monotonic() + seconds, dict[int, int]()
    wanted = {pid for rank, pid in enumerate(pids) if rank not in without}
    while len(found) < len(pids):
        for pid in pids:
            if pid not in found and (done := os.waitpid(pid, os.WNOHANG))[0]:
                found[pid] = os.waitstatus_to_exitcode(done[1])
        if time.monotonic() > deadline or wanted <= found.keys():
            break
        time.sleep(0.02)
    for pid in pids:
        if pid not in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [found.get(pid) for pid in pids]


def serve() -> dict[str, Any]:
    """Serve until the input ends; return in the ranks, with their job."""
    pids: list[int] = []
    for line in sys.stdin:
        job = json.loads(line)
        answer: object = None
        if "wait" in job:
            answer = wait(pids, job["wait"], job["without"])
        else:
            pids, rank = start(job)
            if rank is not None:
                become(rank, job)
                return dict(job)
        print(json.dumps(answer), flush=True)
    sys.exit()


gc.freeze()  # what is imported stays shared, and costs the ranks nothing when they end
job = serve()
script = Path(job["script"])
exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
