"""A rank dies, stops, or runs something else: the others say which one, where they are, and end.

Jobs of three ranks, on every backend of `BACKENDS`. That a job ends within its deadline plus ten
seconds is not measured: a rank that is still there then is killed, and has no exit status.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mdfuse.runtime.watch import EXIT_STATUS

HERE = Path(__file__).resolve().parent

#: Backends whose jobs need no launcher of their own.
BACKENDS = ["gloo"]

TIMEOUT_S = 3.0
RANKS = 3

#: Where the ranks are that wait; all collectives of a team are counted together.
THIRD = r"in run 3 of @gather, at Allgather #[35] \(fault_job\.py:\d+\)"
MEETING = r"meeting \d+ of all 3 ranks"
SILENT = r"rank {0} no sign of life for [\d.]+ s; last seen "


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault, and what the other ranks say.

    Attributes:
        fault: what happens to a rank.
        moment: before the first run, in a communication, or after one.
        says: patterns in the output of each of the other ranks.
        guilty: the rank.
        statuses: exit statuses that the other ranks may have.
        own: the exit status of the guilty one; None where it lives on, or is stopped.
    """

    fault: str
    moment: str
    says: tuple[str, ...]
    guilty: int = 1
    statuses: tuple[int, ...] = (1,)
    own: int | None = None

    def __str__(self) -> str:
        return f"{self.fault} {self.moment} {self.guilty}"


LOOK = "see the log of rank {0}: it died, or stopped"
ENDED = (1, EXIT_STATUS)  # by an error, or by the watchdog

CASES = (
    Case(fault="kill", moment="before", says=(MEETING, r"for ranks \[1\]", SILENT, LOOK), own=-9),
    Case(fault="kill", moment="in", says=(THIRD, SILENT, LOOK), own=-9),
    Case(fault="kill", moment="after", says=(THIRD, SILENT, LOOK), own=-9),
    Case(fault="stop", moment="before", says=(MEETING, r"for ranks \[1\]", SILENT, LOOK)),
    Case(fault="stop", moment="in", says=(THIRD, SILENT, LOOK)),
    Case(fault="stop", moment="after", says=(THIRD, SILENT, LOOK)),
    Case(
        fault="sleep",
        moment="after",
        says=(THIRD, "rank 1 has not posted it", r"see what rank 1 did", r"time\.sleep\(600\)"),
    ),
    Case(fault="raise", moment="after", says=(THIRD, "rank 1 ended with ZeroDivisionError"), own=1),
    Case(fault="leave", moment="after", says=(THIRD, "rank 1 closed its communicator"), own=0),
    Case(
        fault="other",
        moment="before",
        says=("rank 1 runs another program than rank 0", "line 4: program @gather", "@total"),
        own=1,
    ),
    Case(
        fault="other",
        moment="after",
        says=(THIRD, r"rank 1 .*in run \d+ of @total", "compare what rank 1 ran"),
    ),
    Case(fault="refuse", moment="after", says=("another rank refused it", "rank 1: %x has shape")),
    # the rank that keeps the store
    Case(
        fault="kill",
        moment="after",
        guilty=0,
        says=(THIRD, "the store that rank 0 keeps does not answer", LOOK),
        own=-9,
    ),
    Case(
        fault="stop",
        moment="after",
        guilty=0,
        says=(THIRD, "the store that rank 0 keeps does not answer", LOOK),
        statuses=ENDED,
    ),
)


class Server:
    """Forks ranks that have torch imported already."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=20) == 0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def run(server: Server, case: Case, backend: str, folder: Path) -> list[int | None]:
    """Run a job; the exit statuses of what ended in time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server.ask(
        script=str(HERE / "fault_job.py"),
        ranks=RANKS,
        folder=str(folder),
        arguments=[case.fault, case.moment, str(case.guilty)],
        environment={
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "MDFUSE_BACKEND": backend,
            "MDFUSE_TIMEOUT_S": str(TIMEOUT_S),
        },
    )
    until = time.monotonic() + 60
    while not (folder / "fault").exists() and time.monotonic() < until:
        time.sleep(0.02)
    statuses: list[int | None] = server.ask(
        wait=TIMEOUT_S + 10, without=[case.guilty] if case.own is None else []
    )
    return statuses


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_guilty_rank_is_named(case: Case, backend: str, server: Server, tmp_path: Path) -> None:
    statuses = run(server, case, backend, tmp_path)
    for rank in range(RANKS):
        said = (tmp_path / f"out.{rank}").read_text(encoding="utf-8", errors="replace")
        if rank == case.guilty:
            assert statuses[rank] == case.own or case.own is None, said
            continue
        assert statuses[rank] in case.statuses, said
        for pattern in case.says:
            assert re.search(pattern.replace("{0}", str(case.guilty)), said), (pattern, said)
