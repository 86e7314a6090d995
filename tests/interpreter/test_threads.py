"""Functions that run in threads which are there already."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from helpers.bare import bare_environment

from mdfuse.interpreter import threads
from mdfuse.interpreter.threads import keep_ready, start, within


def test_a_job_runs_in_a_thread_of_its_name() -> None:
    seen: list[str] = []
    job = start(lambda: seen.append(threading.current_thread().name), "of-this-test")
    assert job.join(60) and seen == ["of-this-test"]
    assert job.thread is not threading.current_thread()


def test_a_thread_serves_one_job_after_another() -> None:
    threads._idle.clear()
    keep_ready(1)
    jobs = []
    for _ in range(3):
        jobs.append(start(lambda: None, "one"))
        assert jobs[-1].join(60)
        while not threads._idle:  # it comes back right after the job has ended
            time.sleep(0.001)
    assert len({job.thread for job in jobs}) == 1


def test_an_error_of_a_job_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Python would write a traceback to stderr, and end the thread."""
    threads._idle.clear()
    keep_ready(1)

    def fail() -> None:
        raise ValueError("no device\nwith details")

    job = start(fail, "mdfuse-abort of rank 3")
    assert job.join(60) and job.thread.is_alive()
    while not threads._idle:
        time.sleep(0.001)
    assert caplog.messages == ["mdfuse-abort of rank 3: ValueError: no device"]


def test_as_many_stand_ready_as_asked_for() -> None:
    keep_ready(3)
    before = len(threads._idle)
    assert before >= 3
    keep_ready(2)
    assert len(threads._idle) == before


def test_what_is_late_goes_on() -> None:
    go, ended = threading.Event(), threading.Event()

    def wait() -> None:
        go.wait()
        ended.set()

    assert not within(0.01, wait)
    go.set()
    assert ended.wait(60)


def test_python_exits_once_no_thread_is_in_the_store() -> None:
    """A thread that comes back from torch's C++ while Python exits would abort the process."""
    script = """
import time
from datetime import timedelta
from mdfuse.interpreter.threads import start
from mdfuse.torch_private import TCPStore

store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def ask():
    for _ in range(500):
        store.check(["x"])
        time.sleep(0.001)
    print("asked")


start(ask, "mdfuse-store")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=bare_environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr


def test_an_error_of_the_runtime_is_not_in_time() -> None:
    def fail() -> None:
        raise RuntimeError("no store")

    assert not within(60, fail)
    assert within(60, lambda: None)


_AT_EXIT = """
import atexit, threading, time
from mdfuse.interpreter import threads

threads.keep_ready(1)

def at_exit():
    print("ready", threads.within(60, lambda: None))
    stuck = threads.start(lambda: time.sleep(60), "stuck") if {stuck} else None
    print("stuck", threads.within(1, lambda: None))

atexit.register(at_exit)
"""


@pytest.mark.parametrize("stuck", [False, True])
def test_a_process_that_exits(stuck: bool) -> None:
    """Some versions of Python start no thread then, so that one that is stuck leaves none."""
    done = subprocess.run(
        [sys.executable, "-c", _AT_EXIT.format(stuck=stuck)],
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    ready, late = done.stdout.splitlines()
    assert ready == "ready True"
    assert late == "stuck True" or (stuck and sys.version_info >= (3, 12))


def test_a_fork_has_none_of_them() -> None:
    program = """
import os
from mdfuse.interpreter import threads

threads.keep_ready(2)
child = os.fork()
if not child:
    threads.within(60, lambda: os._exit(7))
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "7\n", done.stderr
