"""A rank dies, stops, or runs something else: the others say which one, where they are, and end.

Jobs of three ranks, on all backends without a GPU, and of ranks that share one, whose third run is
the replay of a graph. A job ends within its deadline plus ten seconds
where it has a core; on a machine that is busy it may take ten more. Not measured: a rank that is
still there then is killed, and has no exit status.

mpirun ends a job as soon as a rank dies or fails, unless it is told otherwise; both are tested.
Where it is told to pause before, the pause is granted on top.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from helpers.shown_reports import not_said, shown

from mdfuse.runtime.watch.process import EXIT_STATUS
from multirank.launchers import environment_of_ranks, mpirun_program

HERE = Path(__file__).resolve().parent

TIMEOUT_S = 3.0
RANKS = 3

#: Where the ranks are that wait; all collectives of a team are counted together.
THIRD = r"in run 3 of @gather, at Allgather #[35] \(fault_job\.py:\d+\)"
MEETING = r"meeting \d+ of all 3 ranks"
SILENT = r"rank {0} no sign of life for [\d.]+ s; last seen "
#: A rank that is gone before the first run: where all are slow, before its first sign, too.
UNSEEN = rf"{SILENT}|rank {{0}} no answer: the process ended, or is stuck"


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
        pause_s: how long a rank that fails waits before it has mpirun end the others, seconds.
        speakers: the ranks that say it, where it is not each of the others.
    """

    fault: str
    moment: str
    says: tuple[str, ...]
    guilty: int = 1
    statuses: tuple[int, ...] = (1,)
    own: int | None = None
    pause_s: int = 2
    speakers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.fault} {self.moment} {self.guilty}"


LOOK = "see the log of rank {0}: it died, or stopped"
ENDED = (1, EXIT_STATUS)  # by an error, or by the watchdog

CASES = (
    Case(fault="kill", moment="before", says=(MEETING, r"for ranks \[1\]", UNSEEN, LOOK), own=-9),
    Case(fault="kill", moment="in", says=(THIRD, SILENT, LOOK), own=-9),
    Case(fault="kill", moment="after", says=(THIRD, SILENT, LOOK), own=-9),
    Case(fault="stop", moment="before", says=(MEETING, r"for ranks \[1\]", UNSEEN, LOOK)),
    Case(fault="stop", moment="in", says=(THIRD, SILENT, LOOK)),
    Case(fault="stop", moment="after", says=(THIRD, SILENT, LOOK)),
    Case(fault="sleep", moment="after",
         says=(THIRD, "rank 1 has not posted it", r"see what rank 1 did", r"time\.sleep\(600\)")),
    Case(
        fault="raise",
        moment="after",
        says=(THIRD, "rank 1 ended with ZeroDivisionError"),
        own=1,
        pause_s=7,  # the others report later, at their deadline
    ),
    Case(fault="leave", moment="after", says=(THIRD, "rank 1 closed its communicator"), own=0),
    Case(fault="other", moment="before",
         says=("rank 1 runs another program than rank 0", "line 4: program @gather", "@total"),
         own=1),
    Case(fault="other", moment="after",
         says=(THIRD, r"rank 1 .*in run \d+ of @total", "compare what rank 1 ran")),
    Case(fault="refuse", moment="after", says=("another rank refused it", "rank 1: %x has shape")),
    # the rank that keeps the store
    Case(fault="kill", moment="after", guilty=0,
         says=(THIRD, "the store that rank 0 keeps does not answer", LOOK), own=-9),
    Case(
        fault="stop",
        moment="after",
        guilty=0,
        says=(THIRD, "the store that rank 0 keeps does not answer", LOOK),
        # aborted: where mpirun ends rank 0 first, a thread comes back from the store to a Python
        # that has ended already
        statuses=(*ENDED, -signal.SIGABRT),
    ),
)  # fmt: skip

#: The watchdog knows the program of a replay, but no post in it; it ends who waits for the GPU. A
#: rank that has queued its part may die or stop: its GPU, and its memory, serve the others all the
#: same, and they run on.
REPLAYED = tuple(
    replace(case, says=("@gather", *case.says[1:]), statuses=(*ENDED, -signal.SIGABRT))
    for case in CASES
    if case.fault in ("kill", "stop", "sleep", "raise") and case.moment == "after"
)

#: Before all ranks have met, and when they part; by launch, for each waits for other things.
ABSENT = r"rank {0} did not come to %s: busy elsewhere, or gone"
STOPPED = r"rank {0} stopped, by a signal or a debugger"
MET, NO_ANSWER = r"waited 3 s for ranks \[{0}\]", "rank {0} no answer"
#: Where ranks are slow, others may not have come either, and are named, too.
ELSEWHERE = r"see the log of (rank|ranks( \d,)*) {0}(, \d)*: it died, or stopped, or never came"


def at_init(fault: str, moment: str, guilty: int, *says: str, own: int | None = None) -> Case:
    says = (*says, ELSEWHERE)
    return Case(fault=fault, moment=moment, guilty=guilty, says=says, statuses=ENDED, own=own)


JOINING = [
    (at_init("stop", "join", 1, MET, NO_ANSWER), "gloo"),
    (at_init("stop", "join", 0, ABSENT % "the store"), "gloo"),
    (at_init("stop", "opened", 0, STOPPED), "gloo"),
    (at_init("kill", "opened", 1, MET, NO_ANSWER, own=-9), "gloo"),
    (at_init("sleep", "join", 1, MET, NO_ANSWER), "ucx"),
    (at_init("sleep", "join", 1, ABSENT % "MPI_Init"), "mpi"),
    (at_init("kill", "join", 1, ABSENT % "MPI_Init", own=-9), "mpi"),
    (at_init("stop", "MPI_Init", 1, STOPPED), "mpi"),
    (at_init("stop", "opened", 1, MET, NO_ANSWER), "mpi"),
    (at_init("stop", "join", 1, ABSENT % "MPI_Init"), "mpirun"),
]

PARTING = [
    *(
        (
            Case(
                fault="stop",
                moment="close",
                says=("rank 0 closed before rank 1 did",),
                statuses=(0,),
                speakers=(0,),
            ),
            backend,
        )
        for backend in ("gloo", "ucx", "symmetric")
    ),
    (
        Case(
            fault="stop",
            moment="close",
            guilty=0,
            says=("closed, and the store that rank 0 keeps does not answer",),
            statuses=(0,),
        ),
        "gloo",
    ),
    (at_init("sleep", "close", 1, ABSENT % "MPI_Finalize"), "mpi"),
    (at_init("stop", "MPI_Finalize", 1, STOPPED), "mpi"),
    (at_init("stop", "close", 0, ABSENT % "MPI_Finalize"), "mpi"),
]

#: A child of a rank that communicates, and a rank that does so on two threads.
FORK = (
    "rank 1 cannot run programs that communicate here: this process is a fork of it",
    "rank 1 cannot meet the other ranks here",
    "rank 1 cannot join here",
)
#: Each rank names its own threads, or those of the first that was found out.
CROWD = (r"threads .* of rank \d run programs that communicate at once", "on one thread of each")
IN_ONE_RANK = [
    (Case(fault="fork", moment="after", says=FORK, statuses=(0,), own=0, speakers=(1,)), "gloo"),
    (Case(fault="threads", moment="before", says=CROWD, own=1), "gloo"),
]

#: A rank compiles for longer than the others wait: they say where it is.
COMPILING = [
    (
        Case(
            fault="compile",
            moment="before",
            says=(MEETING, r"for ranks \[1\]", r"rank 1 answers; .* inductor\.compiled = "),
        ),
        backend,
    )
    for backend in ("gloo", "symmetric")
]

#: What mpirun says where it is left to itself, or the rank that is the first to fail.
ENDED_BY_ITSELF = (
    Case(fault="kill", moment="in", says=(r"process rank 1 .*exited on\s+signal 9",), own=-9),
    Case(fault="raise", moment="after", says=("MPI_ABORT was invoked on rank 1 ",), own=1),
    Case(
        fault="stop",
        moment="in",
        says=(THIRD, SILENT, LOOK, "MPI_ABORT was invoked on rank [02] "),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the ranks of a job are started.

    Attributes:
        backend: its name.
        options: of mpirun; None where no launcher is needed.
        has_pause: whether ranks that fail wait before they have mpirun end the others.
        is_on_gpu: whether buffers are on a GPU, which all ranks share.
        timeout_s: the deadline; CUDA takes seconds to begin with.
    """

    backend: str
    options: tuple[str, ...] | None = None
    has_pause: bool = False
    is_on_gpu: bool = False
    timeout_s: float = TIMEOUT_S


#: By name. On "mpi" every rank may speak (docs/bad_days.md), also after the death of another.
LAUNCHES = {
    "gloo": Launch(backend="gloo"),
    "ucx": Launch(backend="ucx"),
    "symmetric": Launch(backend="symmetric"),
    "symmetric on a GPU": Launch(backend="symmetric", is_on_gpu=True, timeout_s=15.0),
    "mpi": Launch(
        backend="mpi",
        options=("--runtime-options", "recoverable,error-nonzero-status=0"),
        has_pause=True,
    ),
    "mpirun": Launch(backend="mpi", options=()),
}

#: How mpirun ends ranks.
ENDED_BY_MPIRUN = -signal.SIGTERM

#: What docs/bad_days.md shows, by case and launch.
SHOWN = shown()


class Server:
    """Forks ranks that have torch imported already."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "helpers" / "fault_server.py")],
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
AT_ONCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What became of a job.

    Attributes:
        statuses: exit statuses, by rank; None where a rank had to be killed in the end.
        said: what each rank said.
        mpirun: the exit status of mpirun and what it said, where it started the ranks.
    """

    statuses: list[int | None]
    said: list[str]
    mpirun: tuple[int, str] | None = None

    def __str__(self) -> str:
        by_mpirun = "" if self.mpirun is None else f"-- mpirun: {self.mpirun[0]}\n{self.mpirun[1]}"
        pairs = enumerate(zip(self.statuses, self.said, strict=True))
        ranks = [f"-- rank {rank}: {status}\n{said}" for rank, (status, said) in pairs]
        return "\n".join([*ranks, by_mpirun])


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[Job]]]:
    """The jobs of all tests that are selected, begun in their order."""
    here = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in here if hasattr(item, "callspec")]
    servers: SimpleQueue[Server] = SimpleQueue()
    started = [Server() for _ in range(min(AT_ONCE, len(params)))]
    for server in started:
        servers.put(server)

    def work(case: Case, launch: Launch, folder: Path) -> Job:
        server = servers.get()
        try:
            return run(server, case, launch, folder)
        finally:
            servers.put(server)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            (str(p["case"]), p["launch"]): pool.submit(
                work, p["case"], LAUNCHES[p["launch"]], tmp_path_factory.mktemp("job")
            )
            for p in params
        }
    for server in started:
        server.close()


def run(server: Server, case: Case, launch: Launch, folder: Path) -> Job:
    """Run a job until all ranks have ended, or should have."""
    pause_s = case.pause_s if launch.has_pause else 0
    launched = command_and_environment(launch, pause_s)
    launched["environment"]["MDFUSE_REPORTS"] = str(folder / "reports")
    server.ask(
        script=str(HERE / "helpers" / "fault_job.py"),
        ranks=RANKS,
        folder=str(folder),
        arguments=[case.fault, case.moment, str(case.guilty)],
        **launched,
    )
    until = time.monotonic() + 60
    while not (folder / "fault").exists() and time.monotonic() < until:
        time.sleep(0.02)
    without = [case.guilty] if case.own is None else []
    statuses = server.ask(wait=launch.timeout_s + 20 + pause_s, without=without)
    said = [text(folder / f"out.{rank}") for rank in range(RANKS)]
    if launch.options is None:
        return Job(statuses=statuses, said=said)
    *statuses, status = statuses
    return Job(statuses=statuses, said=said, mpirun=(status, text(folder / "out.mpirun")))


def command_and_environment(launch: Launch, pause_s: int) -> dict[str, Any]:
    """What the server must know of a launch."""
    environment = {
        **environment_of_ranks(),
        "MDFUSE_BACKEND": launch.backend,
        "MDFUSE_TIMEOUT_S": str(launch.timeout_s),
    }
    if not launch.is_on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if launch.options is not None:
        pause = {"OMPI_MCA_mpi_abort_delay": str(pause_s)}
        command = [mpirun_program() or "mpirun", *launch.options]
        return {"mpirun": command, "environment": environment | pause}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    return {"mpirun": None, "environment": environment | where | sizes}


def text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize(("case", "launch"), JOINING + PARTING + IN_ONE_RANK + COMPILING, ids=str)
def test_ranks_that_join_and_part(
    case: Case, launch: str, jobs: dict[tuple[str, str], Future[Job]]
) -> None:
    # the first that has reported calls MPI_Abort, which gives the others two seconds to do so
    job = jobs[str(case), launch].result()
    check(case, job, some_may_speak=launch in ("mpi", "mpirun"))
    check_page(case, launch, job)


@pytest.mark.parametrize("launch", ["gloo", "ucx", "symmetric", "mpi"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_guilty_rank_is_named(
    case: Case, launch: str, jobs: dict[tuple[str, str], Future[Job]]
) -> None:
    job = jobs[str(case), launch].result()
    check(case, job)
    check_page(case, launch, job)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("launch", ["symmetric on a GPU"])
@pytest.mark.parametrize("case", REPLAYED, ids=str)
def test_the_guilty_rank_is_named_where_graphs_are_replayed(
    case: Case, launch: str, jobs: dict[tuple[str, str], Future[Job]]
) -> None:
    check(case, jobs[str(case), launch].result())


def check(case: Case, job: Job, some_may_speak: bool = False) -> None:
    """How all ranks ended, and what they said; mpirun may end some before they speak."""
    by_mpirun = {ENDED_BY_MPIRUN} if job.mpirun else set()
    if case.own is not None:
        # on MPI, who leaves waits for the others, and no longer than its deadline
        late = {EXIT_STATUS} if job.mpirun and case.fault == "leave" else set()
        assert job.statuses[case.guilty] in {case.own} | by_mpirun | late, str(job)
    others = set(range(RANKS)) - {case.guilty}
    for rank in others:
        assert job.statuses[rank] in {*case.statuses} | by_mpirun, str(job)
    speakers = [job.said[rank] for rank in case.speakers or others]
    for pattern in case.says:
        pattern = pattern.replace("{0}", str(case.guilty))
        have_said = [re.search(pattern, said) is not None for said in speakers]
        assert any(have_said) if some_may_speak else all(have_said), f"{pattern}: {job}"


def check_page(case: Case, launch: str, job: Job) -> None:
    """What docs/bad_days.md shows of this case was said by one rank, or by mpirun."""
    block = SHOWN.get(f"{case}, {launch}", "")
    mpirun = "" if job.mpirun is None else job.mpirun[1]
    missing = [not_said(block, said) for said in (*job.said, mpirun)]
    assert [] in missing, f"{missing}: {job}"


@pytest.mark.parametrize("launch", ["mpirun"])
@pytest.mark.parametrize("case", ENDED_BY_ITSELF, ids=str)
def test_mpirun_ends_the_job(
    case: Case, launch: str, jobs: dict[tuple[str, str], Future[Job]]
) -> None:
    """Left to itself it ends all ranks once one has failed, so that not all of them may speak."""
    job = jobs[str(case), launch].result()
    assert job.mpirun is not None and job.mpirun[0] != 0, str(job)
    check_page(case, launch, job)
    others = set(range(RANKS)) - {case.guilty}
    assert all(job.statuses[rank] in (*case.statuses, ENDED_BY_MPIRUN) for rank in others), str(job)
    said = "\n".join([job.mpirun[1], *(job.said[rank] for rank in others)])
    for pattern in case.says:
        assert re.search(pattern.replace("{0}", str(case.guilty)), said), f"{pattern}: {job}"


def test_the_page_shows_cases_that_there_are() -> None:
    ours = [(c, launch) for c in CASES for launch in ("gloo", "ucx", "symmetric", "mpi")]
    ours += [
        *JOINING,
        *PARTING,
        *IN_ONE_RANK,
        *COMPILING,
        *((c, "mpirun") for c in ENDED_BY_ITSELF),
    ]
    elsewhere = {"test_refusal", "test_reports", "test_full_disk", "test_rebuilding"}
    assert {*SHOWN} - elsewhere <= {f"{case}, {launch}" for case, launch in ours}
    assert elsewhere <= {*SHOWN}
