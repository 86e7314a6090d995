"""Ranks that are forks of this process, with a store that it keeps: they may die one by one."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from mdfuse.cli.launching import variables
from mdfuse.runtime.communicator import live
from mdfuse.torch_private import TCPStore

#: What a rank runs: by its number, and how many processes were in its place before.
Act = Callable[[int, int], None]


class Forked:
    """Ranks of one world; each writes what it prints to a file of the folder."""

    def __init__(self, count: int, act: Act, folder: Path, **environment: str) -> None:
        communicator = live()
        if communicator is not None:
            communicator.close()  # a fork would take it for its own
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False,
            multi_tenant=True, master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._act, self._folder = act, folder
        self._environment = {**variables(count, port, {}), **environment}
        self.pids = {rank: self._begin(rank, 0) for rank in range(count)}

    def begin_again(self, rank: int, place: int = 1) -> None:
        """Start a new process in the place of a rank, as `mdfuse launch --respawn` does."""
        self.pids[rank] = self._begin(rank, place)

    def _begin(self, rank: int, place: int) -> int:
        pid = os.fork()
        if not pid:
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
