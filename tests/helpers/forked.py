"""Ranks that are forks of this process, which may die one by one, and a process with their store.

A fork holds the lock on the memory of the process that it copies, so a store's thread in there
answers nobody meanwhile: seconds for some ranks, on a busy machine. So the process that keeps the
store forks nothing, and ranks begin once all are there, since their deadlines count from then on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from mdfuse.cli.launching import variables
from mdfuse.runtime.communicator import live
from mdfuse.torch_private import TCPStore

#: What a rank runs: by its number, and how many processes were in its place before.
Act = Callable[[int, int], None]


def keep_store() -> tuple[int, int]:
    """Keep a store in a process that forks nothing; return the process and the port."""
    (read, write), parent = os.pipe(), os.getpid()
    keeper = os.fork()
    if not keeper:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)
    port = int(os.read(read, 16))
    os.close(read)
    os.close(write)
    return keeper, port


def end_store(keeper: int, parent: int) -> None:
    """End the process that keeps a store; a fork of its parent leaves it alone."""
    if os.getpid() == parent:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


class Gate:
    """Forks wait there until all of them have been made."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        """Wait, in a fork, until it is opened, or its parent has ended."""
        os.close(self._write)
        os.read(self._read, 1)
        os.close(self._read)

    def open(self) -> None:
        """Let all forks go on."""
        os.close(self._write)
        os.close(self._read)


class Forked:
    """Ranks of one world; each writes what it prints to a file of the folder."""

    def __init__(self, count: int, act: Act, folder: Path, **environment: str) -> None:
        communicator = live()
        if communicator is not None:
            communicator.close()  # a fork would take it for its own
        keeper, port = keep_store()
        weakref.finalize(self, end_store, keeper, os.getpid())
        self._act, self._folder = act, folder
        self._environment = {**variables(count, port, {}), **environment}
        self._gate: Gate | None = Gate()
        self.pids = {rank: self._begin(rank, 0) for rank in range(count)}
        self._gate.open()
        self._gate = None

    def begin_again(self, rank: int, place: int = 1) -> None:
        """Start a new process in the place of a rank, as `mdfuse launch --respawn` does."""
        self.pids[rank] = self._begin(rank, place)

    def _begin(self, rank: int, place: int) -> int:
        pid = os.fork()
        if not pid:
            if self._gate is not None:
                self._gate.wait()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            again = {"MDFUSE_RESPAWNED": str(place)} if place else {}
            self._become({**self._environment, **own, **again}, f"{rank}.{place}")
            os._exit(_status(lambda: self._act(rank, place)))
        return pid

    def _become(self, environment: Mapping[str, str], name: str) -> None:
        os.environ.update(environment)
        out = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for old in (1, 2):
            os.dup2(out, old)
        sys.stdout = sys.stderr = os.fdopen(os.dup(out), "w", buffering=1)

    def wait(self, seconds: float, *ranks: int) -> dict[int, int | None]:
        """Return exit statuses, negative for signals; None for ranks that had to be killed."""
        statuses: dict[int, int | None] = {}
        until = time.monotonic() + seconds
        wanted = set(ranks or self.pids)
        while wanted and time.monotonic() < until:
            for rank in [*wanted]:
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                    wanted.remove(rank)
            time.sleep(0.01)
        for rank in wanted:
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
            statuses[rank] = None
        return statuses

    def said(self, rank: int, place: int = 0) -> str:
        """Return what a rank has printed."""
        return (self._folder / f"{rank}.{place}").read_text()


def _status(act: Callable[[], None]) -> int:
    """Run a rank to its end; return its exit status."""
    try:
        act()
        communicator = live()
        if communicator is not None:
            communicator.close()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
