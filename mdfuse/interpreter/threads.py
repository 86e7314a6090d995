"""Run functions in threads that are there already.

From version 3.12 on, Python starts no thread once it begins to exit. Communicators are closed only
then, with a limit of time on each step: the threads for that have to wait from the start.

Before 3.14, a thread that comes back from torch's C++ once Python is exiting is ended there, which
C++ takes for an error: the process aborts (SIGABRT). So Python exits once no job runs, or after a
limit of time: a late job waits for something that does not answer.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from mdfuse.errors import reason

_log = logging.getLogger("mdfuse.comm")

_IDLE = "mdfuse-idle"

#: How long Python's exit waits for jobs that still run, seconds.
_EXIT_S = 2.0


@dataclass(eq=False)
class Job:
    """A function that runs in a thread, or has run.

    Attributes:
        function: the function.
        name: the name of its thread meanwhile.
        thread: the thread.
    """

    function: Callable[[], object]
    name: str
    thread: threading.Thread
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run the function here; its error is logged."""
        try:
            self.function()
        except Exception as error:  # the thread goes on to other jobs
            _log.warning("%s: %s", self.name, reason(error))
        finally:
            _running.discard(self)
            self._ended.set()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until the job has ended, for some seconds at most; return whether it has."""
        return self._ended.wait(seconds)


class _Worker:
    """A thread that runs one job after another; it ends with the process."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=_IDLE, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            job = self.jobs.get()
            self.thread.name = job.name
            job.run()
            self.thread.name = _IDLE
            del job  # its objects may be large
            _idle.append(self)


#: Workers without a job.
_idle: deque[_Worker] = deque()
#: Jobs that have begun, or are about to.
_running: set[Job] = set()
os.register_at_fork(after_in_child=_idle.clear)  # a fork has the thread alone that forked
os.register_at_fork(after_in_child=_running.clear)


@atexit.register  # registered before communicators, so that it runs after they are closed
def _let_end() -> None:
    """Wait for the jobs that run, for `_EXIT_S` at most."""
    until = time.monotonic() + _EXIT_S
    for job in list(_running):
        job.join(max(until - time.monotonic(), 0.0))


def keep_ready(count: int) -> None:
    """Start threads until so many have no job."""
    while len(_idle) < count:
        _idle.append(_Worker())


def start(function: Callable[[], object], name: str) -> Job:
    """Run a function in a thread that is idle, else in a new one.

    Raises:
        RuntimeError: none is idle, and Python starts no more.
    """
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    job = Job(function, name, worker.thread)
    _running.add(job)
    worker.jobs.put(job)
    return job


def within(seconds: float, function: Callable[[], object], name: str = "mdfuse-store") -> bool:
    """Run a function in a thread; return whether it ended in time and without a RuntimeError.

    A function that is late goes on in its thread: a store whose host is stopped never answers,
    whatever its own timeout is.
    """
    done: list[bool] = []

    def run() -> None:
        try:
            function()
        except RuntimeError:
            return
        done.append(True)

    try:
        start(run, name).join(seconds)
    except RuntimeError:  # Python exits, and all threads are stuck
        return False
    return bool(done)
