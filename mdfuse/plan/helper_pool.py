"""Helper processes compile functions for this process, which reads them from files.

Inductor compiles one function at a time in a process, and takes seconds to be imported. So helpers
start while a module is imported or a program lowered, and each takes the longest function that
nobody has begun. When there is nothing to read, this process compiles what they have not begun,
from the shortest on, and it compiles what they cannot.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from mdfuse.bootstrap import detect
from mdfuse.config import (
    HELPERS,
    compiles,
    helpers_from_environment,
    options_from_environment,
)
from mdfuse.errors import PACKAGE, BackendError, reason
from mdfuse.interpreter.threads import Job, keep_ready, start
from mdfuse.plan.artefacts import Artefacts, artefacts
from mdfuse.plan.inductor import TracedGraph
from mdfuse.plan.packed_graphs import packed, packed_settings

#: Cores that a helper shares with its compilers of kernels, and the most helpers of a process.
_CORES, _MOST = 4, 8

#: Memory of a GPU that is free for each helper, which times kernels there, bytes.
_GPU_BYTES = 4 << 30

#: From so many expressions on, helpers start before it is known what there is to compile; so do
#: they from so many parameters of a module on.
_LONG, _MANY = 500, 64

#: So few functions are compiled before a helper that is not there yet would be ready.
_FEW = 3

#: Seconds without work after which a helper is ended, and for it to be gone then.
_IDLE_S, _GONE_S = 300.0, 5.0

#: A process that looks for GPUs so can fork others that use them.
_ASKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

#: Variables by which a helper would join the rank's job: beginnings, and names.
_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_")
_PLACES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
           "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # fmt: skip


@dataclass(eq=False)
class HelperJob:
    """A function that a helper may compile.

    Attributes:
        length: of its graph.
        work: what a helper takes: a folder, the name of files there, a packed graph.
        pool: whose helpers may; None: nobody's, and it is over.
        is_begun: a helper has begun it.
        is_over: no helper goes on with it.
        is_made: a helper compiled it.
        why: why none could.
    """

    length: int
    work: bytes = b""
    pool: _Pool | None = None
    is_begun: bool = False
    is_over: bool = False
    is_made: bool = False
    why: str | None = None


@dataclass(eq=False)
class _Helper:
    """A helper, and this process's end of the connection with it.

    Attributes:
        server: the process that forks it.
        pid: its number, and that of the group of all processes below it, once it is there.
        code: how it ended.
    """

    server: subprocess.Popen[bytes]
    connection: Connection
    pid: int | None = None
    code: int | None = None

    def answer(self) -> Any:
        """Wait for what it sends.

        Raises:
            EOFError, OSError: it has ended.
        """
        answer = self.connection.recv()
        if isinstance(answer, int):
            self.code = answer
            raise EOFError
        return answer

    def kill(self) -> None:
        """End it with all processes below it; the others, too, while they are one process."""
        if self.pid is None and self.code is not None:
            return  # it was not forked
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid if self.pid is None else self.pid, signal.SIGKILL)

    def ended(self) -> str:
        """Wait until it has ended, or end it; return how it did."""
        self._wait()
        self.kill()
        self._wait()
        self.connection.close()
        code = self.code
        return f"signal {-code}" if code is not None and code < 0 else f"code {code}"

    def _wait(self) -> None:
        """Wait a while until the server, or else its own end, tells how it ended."""
        try:
            while self.code is None and self.connection.poll(_GONE_S):
                self.answer()
        except (EOFError, OSError):
            if self.code is None:
                self.code = _waited(self.server)


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GONE_S)
    return process.returncode


@dataclass(eq=False)
class _Pool:
    """Helpers that were started together.

    Attributes:
        artefacts: where they leave what they compiled.
        settings: of the compiler in this process, packed.
        helpers: those that have not ended.
        jobs: those that are not over.
        is_used: they got a job, so that they may hold memory of a GPU.
        is_ended: they get no further jobs.
        why_ended: why this process has ended them before they were done.
        changed: guards all of this, and is told of changes.
    """

    artefacts: Artefacts
    settings: bytes
    helpers: list[_Helper] = field(default_factory=list)
    threads: list[Job] = field(default_factory=list)
    jobs: list[HelperJob] = field(default_factory=list)
    is_used: bool = False
    is_ended: bool = False
    why_ended: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, count: int) -> None:
        """Start a process that forks helpers, each with a thread here that gives it jobs.

        Raises:
            OSError, RuntimeError: there can be no further process, or thread.
        """
        keep_ready(count)  # before there is a process that none serves
        pairs = [Pipe() for _ in range(count)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        command = [*_command(), ",".join(map(str, descriptors)), str(os.getpid())]
        try:
            server = subprocess.Popen(
                command, env=_environment(max(1, _cores() // count)), pass_fds=descriptors,
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.helpers = [_Helper(server, ours) for ours, _ in pairs]
        for helper in self.helpers:
            self.threads.append(start(partial(self._serve, helper), "mdfuse-helper"))

    def _serve(self, helper: _Helper) -> None:
        """Give a helper jobs, one after the other, until it ends or is not needed any more."""
        job, why = None, None
        try:
            helper.pid, why = helper.answer()
            if why is None:
                helper.connection.send_bytes(self.settings)
            while why is None and (job := self._next()) is not None:
                helper.connection.send_bytes(job.work)
                is_made, failure = helper.answer()
                with self.changed:
                    self._close(job, is_made, failure)
                job = None
            helper.kill()
            helper.ended()
        except Exception as error:  # of a helper that ended; else whatever has come from it
            how = helper.ended()
            is_gone = isinstance(error, EOFError | OSError)
            why = f"it ended with {how}" if is_gone else reason(error)
        self.artefacts.remove_parts(helper.pid or helper.server.pid)
        with self.changed:
            self.helpers.remove(helper)
            lost = [] if job is None else [job]
            for x in lost if self.helpers else [*self.jobs]:
                self._close(x, False, self.why_ended or why)
            is_last = not self.helpers
        if is_last and _waited(helper.server) is None:
            with suppress(ProcessLookupError):
                os.killpg(helper.server.pid, signal.SIGKILL)
            _waited(helper.server)

    def _next(self) -> HelperJob | None:
        """Wait for a job, and return the longest one; None where helpers are to end."""
        with self.changed:
            while not self.is_ended:
                if waiting := [x for x in self.jobs if not x.is_begun]:
                    job = max(waiting, key=lambda x: x.length)
                    job.is_begun = True
                    return job
                if not self.changed.wait(_IDLE_S):
                    break
            return None

    def _close(self, job: HelperJob, is_made: bool, why: str | None) -> None:
        job.is_over, job.is_made, job.why, job.work = True, is_made, why, b""
        self.jobs.remove(job)
        self.changed.notify_all()

    def add(self, job: HelperJob) -> None:
        """Give helpers a job; it is over at once where none is left."""
        with self.changed:
            job.pool = self
            self.jobs.append(job)
            self.is_used = True
            self.changed.notify_all()
            if not self.helpers:
                self._close(job, False, None)

    def settled(self, jobs: Collection[HelperJob], timeout_s: float) -> HelperJob | None:
        """Return a job that is over, or one that is taken back; see `settled`."""
        with self.changed:
            while (over := next((x for x in jobs if x.is_over), None)) is None:
                if waiting := [x for x in jobs if not x.is_begun]:
                    self._close(min(waiting, key=lambda x: x.length), False, None)
                elif not self.changed.wait(timeout_s):
                    return None
            return over

    def end(self, why: str | None = None) -> None:
        """End the helpers; jobs that are not over are over, for this reason."""
        with self.changed:
            self.is_ended, self.why_ended = True, why
            for helper in self.helpers:
                helper.kill()
            self.changed.notify_all()


#: Pools of this process; all but one have ended, and their helpers are about to.
_POOLS: list[_Pool] = []

#: One thread at a time starts helpers, or forks this process.
_STARTING = threading.Lock()


def _running() -> _Pool | None:
    """Return the helpers of this process that take jobs, if there are any."""
    return next((pool for pool in [*_POOLS] if pool.helpers and not pool.is_ended), None)


def start_for(expressions: int) -> bool:
    """Start helpers for a program of so many expressions, if they pay; return if there are any.

    Raises:
        ProgramError: the variable of their number cannot be read.
    """
    chosen = helpers_from_environment()
    if expressions >= _LONG and torch.cuda.is_initialized():
        _start(_MOST, chosen)
    return _running() is not None


def start_for_module(parameters: int) -> None:
    """Start helpers for a module with so many parameters while it is imported, if they pay.

    Raises:
        ProgramError: a variable cannot be read.
    """
    is_long = parameters >= _MANY and torch.cuda.is_initialized()
    if is_long and compiles(options_from_environment(None)):
        start_for(_LONG)


def start_if_needed(functions: int) -> None:
    """Start helpers for so many functions that are to be compiled, if they pay.

    Raises:
        ProgramError: the variable of their number cannot be read.
    """
    chosen = helpers_from_environment()
    if functions > _FEW or chosen:
        _start(functions, chosen)


def _start(most: int, chosen: int | None) -> None:
    """Start at most so many helpers: as many as were chosen, else as many as pay."""
    with _STARTING:
        if _running() is not None or not _has_python() or (folder := artefacts()) is None:
            return
        if count := min(most, _paying() if chosen is None else chosen):
            pool = _Pool(folder, _settings())
            _POOLS[:] = [*(x for x in _POOLS if x.helpers), pool]
            with suppress(OSError, RuntimeError):  # this process compiles by itself
                pool.start(count)


def hand_over(name: str, traced: TracedGraph) -> HelperJob | None:
    """Let helpers compile a function into the files of a name; None: there are no helpers."""
    pool = _running()
    if pool is None or (folder := artefacts()) is None:
        return None
    job = HelperJob(len(traced.graph.graph.nodes))
    try:
        job.work = pickle.dumps((str(folder.folder), name, packed(traced)))
    except Exception as error:  # whatever the parts of a graph raise
        job.is_over, job.why = True, reason(error)
        return job
    pool.add(job)
    return job


def settled(jobs: Collection[HelperJob], timeout_s: float) -> HelperJob:
    """Return a job that is over, or else one that no helper has begun, and none will.

    Args:
        jobs: those from which one is chosen, at least one.
        timeout_s: how long to wait for helpers, if they have begun all; then they are ended.
    """
    over = next((x for x in jobs if x.is_over), None)
    if over is not None:
        return over
    first = next(iter(jobs))
    pool = first.pool
    assert pool is not None, "a job of no pool is over"
    over = pool.settled([x for x in jobs if x.pool is pool], timeout_s)
    if over is None:
        over = first
        over.is_over, over.why = True, f"it took longer than timeout_s={timeout_s:g}"
        pool.end(over.why)
    return over


def end_idle(instructions: int = 0) -> None:
    """End helpers that have done all they were given; on GPUs, wait until their memory is free.

    Args:
        instructions: of a program all of whose functions are there; a long one needed no helper.
    """
    pool = _running()
    is_needless = instructions >= _LONG // 2  # loops have fewer than expressions
    if pool is not None and (pool.is_used or is_needless) and not pool.jobs:
        pool.end()
        for thread in pool.threads if torch.cuda.is_initialized() else ():
            thread.join(_GONE_S)


def end(why: str | None = None) -> None:
    """End all helpers, whatever they do."""
    for pool in _POOLS:
        pool.end(why)


@atexit.register
def _end_and_wait() -> None:
    pools = [*_POOLS]
    end()
    for thread in (x for pool in pools for x in pool.threads):
        thread.join(_GONE_S)


def _forget() -> None:
    """Leave the helpers to the process that was forked, which would else never be gone for them.

    No thread of this one hears of their jobs.
    """
    for pool in _POOLS:
        for helper in pool.helpers:
            helper.connection.close()
        for job in pool.jobs:
            job.is_over = True
    _POOLS.clear()
    _STARTING.release()


os.register_at_fork(
    before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_forget
)

# -- processes -------------------------------------------------------------------------------------


def _settings() -> bytes:
    """Return the compiler's settings for helpers; none where they cannot leave this process."""
    try:
        return packed_settings(_device())
    except Exception:  # of any part of them; each function says why
        return b""


def _device() -> torch.device:
    """Return the device on which helpers compile a first function: the rank's GPU, if it is set."""
    if torch.cuda.is_initialized():
        with suppress(BackendError):  # which says so where ranks meet
            place, current = detect(os.environ).local_rank, torch.cuda.current_device()
            if current == place % torch.cuda.device_count():
                return torch.device("cuda", current)
    return torch.device("cpu")


def _paying() -> int:
    """Return how many helpers the cores, and the memory of the GPU, have room for."""
    count = min(_MOST, _cores() // _CORES)
    if count and torch.cuda.is_initialized():
        free, _ = torch.cuda.mem_get_info()
        count = min(count, free // _GPU_BYTES)
    return count


def _cores() -> int:
    """Return how many cores this rank has, beside the other ranks of its host."""
    try:
        ranks = detect(os.environ).local_size or torch.cuda.device_count()
    except BackendError:  # which says so where ranks meet
        ranks = torch.cuda.device_count()
    return min([len(os.sched_getaffinity(0)), *_quota()]) // max(1, ranks)


def _quota() -> Iterator[int]:
    """Yield how many cores' time a container has, where it is limited."""
    with suppress(OSError, ValueError):
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        yield max(1, int(most) // int(period))


def _has_python() -> bool:
    """Return whether this process's program is Python, and no application that embeds it."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _command() -> list[str]:
    """Return the command of a helper, but for the connection and the rank's process.

    It imports from where this process does, and mdfuse from where this process has it, which may
    have gone to another folder since.
    """
    folder, paths = str(Path(PACKAGE).parent), [*map(str, sys.path)]
    imports = f"import sys; sys.path.insert(0, {folder!r}); import mdfuse; sys.path[:] = {paths!r}"
    start = "from mdfuse.plan.helper_process import main; main(sys.argv[1], int(sys.argv[2]))"
    return [sys.executable, "-c", f"{imports}; {start}"]


def _environment(compilers: int) -> dict[str, str]:
    """Return the variables of a helper, with so many compilers of kernels."""
    usual = {"TORCHINDUCTOR_COMPILE_THREADS": str(compilers)}
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHERS) and name not in _PLACES
    }
    return {**usual, **_ASKS, **others, HELPERS: "0"}
