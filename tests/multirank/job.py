"""The tests of one world size, run by jobs that this process starts and watches."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from multirank.verdicts import Verdict, VerdictReader

#: A job stops at its first failure and another one runs the rest. A change that breaks everything
#: would start one job for each test: after this many jobs the remaining tests fail unseen.
MOST_JOBS = 8

#: How long the other ranks of a test may go on after one has exited. They are probably stuck; where
#: they notice by themselves, they tell more.
LOSS_S = 6.0

#: How much of a job's output a verdict quotes.
_TAIL_CHARACTERS = 8000


class Job:
    """One launch: a process tree, its output, and the folder where its ranks report.

    Args:
        command: given the reports' folder and a file with node ids, the command line.
        tests: the node ids to run.
        cwd: where the command runs.
        environment: what it sees.
    """

    def __init__(
        self,
        command: Callable[[Path, Path], list[str]],
        tests: Sequence[str],
        cwd: Path,
        environment: dict[str, str],
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="multirank-")
        folder = Path(self._folder.name)
        arguments = folder / "tests"
        arguments.write_text("\n".join(tests))
        self._output = folder / "output"
        self._reports = folder / "reports"
        self.reader = VerdictReader(folder)
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command(folder, arguments),
                cwd=cwd,
                env=environment | {"MDFUSE_REPORTS": str(self._reports)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def output_tail(self) -> str:
        return self._output.read_text(errors="replace")[-_TAIL_CHARACTERS:]

    def reports(self) -> str:
        """What watchdogs wrote: a rank's stderr may be pytest's when its watchdog ends it."""
        files = sorted(self._reports.glob("*.txt"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def stop(self) -> None:
        """End the job: politely, so that the launcher ends its ranks, then not."""
        for number, grace_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
            if self.status is not None:
                break
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(grace_s)

    def has_lost_a_rank(self) -> bool:
        return not all(process.is_visible() for process in self.reader.processes())

    def stacks(self) -> str:
        """What every rank that still runs is doing."""
        return "\n".join(process.dump_stacks() for process in self.reader.processes())

    def close(self) -> None:
        self.stop()
        for process in self.reader.processes():
            process.kill()  # a launcher that had to be killed leaves its ranks behind
        self._folder.cleanup()


class HostedTests:
    """Verdicts of tests that want one world size, from as many jobs as failures make necessary.

    Args:
        tests: the node ids, in the order in which they run.
        launch: starts a job for some of them.
        patience_s: a job that starts no test and settles none for this long is ended.
    """

    def __init__(
        self, tests: Sequence[str], launch: Callable[[Sequence[str]], Job], patience_s: float
    ) -> None:
        self._remaining = list(tests)
        self._last = tests[-1]
        self._launch = launch
        self._patience_s = patience_s
        self._verdicts: dict[str, Verdict] = {}
        self._job: Job | None = None
        self._jobs = 0
        self._under_way: str | None = None
        self._last_sign = 0.0

    def verdict(self, test: str) -> Verdict:
        """Wait for the verdict on a test; there always is one."""
        while not self._is_final(test):
            if self._job is None:
                self._start()
            self._follow()
        return self._verdicts[test]

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

    def _is_final(self, test: str) -> bool:
        """Whether nothing can change it: a failure and the last one wait for the job's end."""
        verdict = self._verdicts.get(test)
        if verdict is None:
            return False
        return self._job is None or (verdict.failure is None and test != self._last)

    def _start(self) -> None:
        if self._jobs == MOST_JOBS:
            self._fail_remaining(f"not run: {MOST_JOBS} jobs before this test have failed")
            return
        self._jobs += 1
        self._under_way = None
        self._last_sign = time.monotonic()
        self._job = self._launch(self._remaining)

    def _follow(self) -> None:
        """Take in what the job has reported, and its end."""
        if self._job is None:
            return
        status = self._job.status  # before reading: what an ended job wrote is then all there
        for news in self._job.reader.new():
            self._last_sign = time.monotonic()
            self._take(news)
        if status is not None:
            self._end(self._job, f"the job ended with status {status}", is_good=status == 0)
        elif time.monotonic() - self._last_sign > self._patience_with(self._job):
            stacks = self._job.stacks()
            self._job.stop()
            self._end(self._job, f"the job got no further\n{stacks}", is_good=False)
        else:
            time.sleep(0.02)

    def _patience_with(self, job: Job) -> float:
        """Short where a rank has left a test: torchrun does not mind if it left with status 0."""
        is_busy = self._under_way in self._remaining
        return LOSS_S if is_busy and job.has_lost_a_rank() else self._patience_s

    def _take(self, news: str | Verdict) -> None:
        if isinstance(news, str):
            if news not in self._verdicts:  # else the line of a slower rank, read late
                self._under_way = news
            return
        self._verdicts.setdefault(news.test, news)
        if news.test in self._remaining:
            self._remaining.remove(news.test)

    def _end(self, job: Job, how: str, *, is_good: bool) -> None:
        """Settle what an ended job left open: whoever it was busy with, or nobody's failure."""
        reports = job.reports()
        told = f"what its watchdogs reported:\n{reports}" if reports else ""
        story = f"{how}\n{told}its last output:\n{job.output_tail()}"
        self.close()
        if self._under_way is not None and self._under_way in self._remaining:
            self._fail(self._under_way, f"no verdict: {story}")
        elif (explained := self._explanation()) is not None:
            self._fail(explained.test, "\n".join(filter(None, (explained.failure, told))))
        elif self._remaining:
            self._fail_remaining(f"never run: {story}")
        elif not is_good:
            self._fail(self._last, f"passed, but then {story}")

    def _explanation(self) -> Verdict | None:
        """The failure that the job stopped at, as it should."""
        last = self._verdicts.get(self._under_way or "")
        return last if last is not None and last.failure is not None else None

    def _fail_remaining(self, why: str) -> None:
        for test in list(self._remaining):
            self._fail(test, why)

    def _fail(self, test: str, why: str) -> None:
        seconds = self._verdicts[test].seconds if test in self._verdicts else 0.0
        self._verdicts[test] = Verdict(test=test, failure=why, seconds=seconds)
        if test in self._remaining:
            self._remaining.remove(test)
