"""Starts the ranks of one small job after the other, each a fork that has torch imported already.

Reads lines of JSON: {"script", "ranks", "folder", "environment", "arguments"} starts a job, whose
ranks run the script as their main program; {"wait": seconds} ends it and gives the exit statuses,
None for ranks that had to be killed then, which a stopped one is not counted among.
"""

from __future__ import annotations

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


def wait(pids: list[int], seconds: float) -> list[int | None]:
    """Exit statuses, negative for signals, of what ended in time; the rest is killed."""
    deadline, found = time.monotonic() + seconds, dict[int, int]()
    while len(found) < len(pids):
        for pid in pids:
            if pid not in found and (done := os.waitpid(pid, os.WNOHANG))[0]:
                found[pid] = os.waitstatus_to_exitcode(done[1])
        left = [pid for pid in pids if pid not in found]
        if time.monotonic() > deadline or all(map(is_stopped, left)):
            break
        time.sleep(0.02)
    for pid in pids:
        if pid not in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [found.get(pid) for pid in pids]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def serve() -> dict[str, Any]:
    """Serve until the input ends; return in the ranks, with their job."""
    pids: list[int] = []
    for line in sys.stdin:
        job = json.loads(line)
        answer: object = None
        if "wait" in job:
            answer = wait(pids, job["wait"])
        else:
            pids, rank = start(job)
            if rank is not None:
                become(rank, job)
                return dict(job)
        print(json.dumps(answer), flush=True)
    sys.exit()


job = serve()
script = Path(job["script"])
exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
