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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from mdfuse.runtime.watch import EXIT_STATUS

HERE = Path(__file__).resolve().parent

#: Backends whose jobs need no launcher of their own.
BACKENDS = ["gloo", "ucx"]

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


#: Jobs at once: they wait more than they work.
AT_ONCE = 2

Job = tuple[list[int | None], list[str]]


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[Job]]]:
    """The jobs of all tests that are selected, begun in their order."""
    here = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in here if isinstance(item, pytest.Function)]
    servers: SimpleQueue[Server] = SimpleQueue()
    started = [Server() for _ in range(min(AT_ONCE, len(params)))]
    for server in started:
        servers.put(server)

    def work(case: Case, backend: str, folder: Path) -> Job:
        server = servers.get()
        try:
            return run(server, case, backend, folder)
        finally:
            servers.put(server)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            (str(p["case"]), p["backend"]): pool.submit(
                work, p["case"], p["backend"], tmp_path_factory.mktemp("job")
            )
            for p in params
        }
    for server in started:
        server.close()


def run(server: Server, case: Case, backend: str, folder: Path) -> Job:
    """Run a job: the exit statuses of what ended in time, and what each rank said."""
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
    without = [case.guilty] if case.own is None else []
    statuses = server.ask(wait=TIMEOUT_S + 10, without=without)
    files = [folder / f"out.{rank}" for rank in range(RANKS)]
    return statuses, [file.read_text(encoding="utf-8", errors="replace") for file in files]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_guilty_rank_is_named(
    case: Case, backend: str, jobs: dict[tuple[str, str], Future[Job]]
) -> None:
    statuses, said = jobs[str(case), backend].result()
    if case.own is not None:
        assert statuses[case.guilty] == case.own, said[case.guilty]
    for rank in set(range(RANKS)) - {case.guilty}:
        assert statuses[rank] in case.statuses, said[rank]
        for pattern in case.says:
            pattern = pattern.replace("{0}", str(case.guilty))
            assert re.search(pattern, said[rank]), (pattern, said[rank])
