"""The harness of the multi-rank tests: what must be red is red, and says where."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from multirank.job import MOST_JOBS, HostedTests
from multirank.launchers import LAUNCHERS, environment_of_ranks
from multirank.verdicts import Verdict

TESTS = Path(__file__).parent

#: Ranks wait three quarters of the time limit for the verdict of one that hangs, as one does below.
INI = """
[pytest]
addopts = --strict-markers
timeout = 24
"""

CONFTEST = 'pytest_plugins = ("multirank.plugin",)\n'

#: Every test here but the first and the last goes wrong in its own way. Each line that would hang
#: without the harness waits for a rank that never comes. How torchrun and mpirun end the job is
#: another thing each time.
WRONG = """
import os
import time

import pytest

pytestmark = pytest.mark.world(2)

def test_good(comm):
    assert comm.size == 2

def test_fails_on_one(comm):
    assert comm.rank == 0, "rank one says no"

def test_others_wait_for_the_one_that_fails(comm):
    assert comm.rank == 1, "rank zero says no"
    comm.barrier()

def test_rank_exits(comm):
    if comm.rank == 1:
        os._exit(0)
    comm.barrier()

def test_the_watchdog_ends_a_rank(comm):
    comm.barrier()
    if comm.rank == 0:
        comm._watch._timeout = 0.5
        with comm._watch.waiting("what never comes"):
            time.sleep(60)
    comm.barrier()

@pytest.mark.parametrize("text", ["a b", "[é]::x"])
def test_good_again(comm, text):
    comm.barrier()
"""

#: What ranks themselves take for a failure: the job ends as after the first one of `WRONG`.
FAILURES = """
def test_skips(comm):
    pytest.skip("as if there were nothing to see")

@pytest.fixture
def broken(comm):
    yield
    assert comm.rank != 1, "cleaning up went wrong"

def test_teardown_fails(broken):
    pass
"""


def write_folder(folder: Path, tests: str) -> Path:
    """Make `folder` a small checkout with tests of its own, run by this checkout's harness."""
    (folder / "pytest.ini").write_text(INI)
    (folder / "conftest.py").write_text(CONFTEST)
    multidevice = folder / "multidevice"
    multidevice.mkdir()
    (multidevice / "conftest.py").write_text((TESTS / "multidevice/conftest.py").read_text())
    (multidevice / "test_it.py").write_text(tests)
    return folder


def run(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = environment_of_ranks()
    paths = [str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def failure_in(output: str, test: str) -> str:
    """What a run's report says of a failed test."""
    found = re.search(rf"^_+ {test} _+$(.*?)^(__|=====)", output, re.DOTALL | re.MULTILINE)
    assert found, f"{test} did not fail:\n{output}"
    return found.group(1)


@pytest.mark.timeout(300)  # one job for each failure
@pytest.mark.parametrize(
    ("launcher", "more"), [("torchrun", FAILURES), ("mpirun", "")], ids=["torchrun", "mpirun"]
)
def test_each_test_of_a_run_has_its_own_verdict(launcher: str, more: str, tmp_path: Path) -> None:
    """One run of plain pytest over what goes wrong, whose jobs take most of the time: one test."""
    folder = write_folder(tmp_path, WRONG + more)
    done = run(folder, pytest_command("-v", "--launcher", launcher))
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = [
        ("test_good", "PASSED"),
        ("test_fails_on_one", "FAILED"),
        ("test_others_wait_for_the_one_that_fails", "FAILED"),
        ("test_rank_exits", "FAILED"),
        ("test_the_watchdog_ends_a_rank", "FAILED"),
        ("test_good_again", "PASSED"),
        ("test_good_again", "PASSED"),
    ]
    verdicts += [("test_skips", "FAILED"), ("test_teardown_fails", "FAILED")] if more else []
    assert re.findall(r"::(test_\w+).* (PASSED|FAILED)", done.stdout) == verdicts
    text = failure_in(done.stdout, "test_fails_on_one")
    assert "rank 1: AssertionError: rank one says no" in text
    assert "rank 0" not in text
    text = failure_in(done.stdout, "test_others_wait_for_the_one_that_fails")
    assert "rank 0: AssertionError: rank zero says no" in text
    assert "rank 1: no verdict" in text
    assert re.search(r'File ".*test_it.py", line \d+ in test_others_wait', text), "the stacks"
    assert "no verdict" in failure_in(done.stdout, "test_rank_exits"), "it is not waited for"
    text = failure_in(done.stdout, "test_the_watchdog_ends_a_rank")
    assert "mdfuse.BackendError: what never comes is not done on rank 0 after" in text
    assert re.search(r"this report is in .*/reports/rank0-pid\d+-\w+\.txt", text)
    if not more:
        return
    text = failure_in(done.stdout, "test_skips")
    assert "ranks 0, 1: skipped itself" in text
    assert "as if there were nothing to see" in text
    text = failure_in(done.stdout, "test_teardown_fails")
    assert "rank 1: teardown: AssertionError: cleaning up went wrong" in text


class TestDirectRun:
    """pytest that is itself started by a launcher."""

    @pytest.fixture(params=LAUNCHERS)
    def two_ranks(self, request: pytest.FixtureRequest, tmp_path: Path) -> DirectRun:
        return DirectRun(request.param, tmp_path)

    def test_matching_tests_run_and_the_others_are_deselected(self, two_ranks: DirectRun) -> None:
        done = two_ranks.of(
            "import pytest\n"
            "@pytest.mark.world(2)\n"
            "def test_two(comm): comm.barrier()\n"
            "@pytest.mark.world(4)\n"
            "def test_four(comm): assert False\n"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("1 passed, 1 deselected") == 1, "only rank 0 reports"

    def test_no_matching_test_is_red(self, two_ranks: DirectRun) -> None:
        done = two_ranks.of(
            "import pytest\n@pytest.mark.world(3)\ndef test_three(comm): comm.barrier()\n"
        )
        assert done.returncode != 0
        assert "1 deselected" in done.stdout

    def test_a_failure_stops_every_rank(self, two_ranks: DirectRun) -> None:
        done = two_ranks.of(WRONG)
        assert done.returncode != 0
        assert "rank 1: AssertionError: rank one says no" in done.stdout
        assert "1 failed, 1 passed" in done.stdout

    def test_ranks_that_collect_different_tests_do_not_start(self, two_ranks: DirectRun) -> None:
        done = two_ranks.of(
            "import os\n"
            "import pytest\n"
            "RANK = os.environ.get('RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
            "@pytest.mark.world(2)\n"
            "@pytest.mark.parametrize('rank', [RANK])\n"
            "def test_that_differs(comm, rank): comm.barrier()\n"
        )
        assert done.returncode != 0
        assert "the ranks did not collect the same tests" in done.stdout


class DirectRun:
    """Two ranks of pytest under a launcher."""

    def __init__(self, launcher: str, folder: Path) -> None:
        self._launcher = launcher
        self._folder = folder

    def of(self, tests: str) -> subprocess.CompletedProcess[str]:
        folder = write_folder(self._folder, tests)
        arguments = ["-p", "no:cacheprovider", "--color=no"]
        return run(folder, LAUNCHERS[self._launcher](2, arguments))


@pytest.mark.parametrize(
    ("marker", "complaint"),
    [
        ("", "a test in multidevice/ needs @pytest.mark.world(N)"),
        ("@pytest.mark.world", "world takes one number of ranks"),
        ("@pytest.mark.world(0)", "world takes one number of ranks"),
        ("@pytest.mark.world(2, 4)", "world takes one number of ranks"),
    ],
)
def test_a_test_without_a_world_is_an_error(tmp_path: Path, marker: str, complaint: str) -> None:
    write_folder(tmp_path, f"import pytest\n{marker}\ndef test_it(): pass\n")
    done = run(tmp_path, pytest_command("--collect-only"))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert complaint in done.stderr


@pytest.mark.parametrize(("launcher", "selected"), [("mpirun", 2), ("torchrun", 1)])
def test_a_backend_that_a_launcher_cannot_have_is_deselected(
    tmp_path: Path, launcher: str, selected: int
) -> None:
    tests = "import pytest\npytestmark = pytest.mark.world(2)\ndef test_any(comm): pass\n"
    write_folder(tmp_path, tests + "@pytest.mark.backend('mpi')\ndef test_mpi(comm): pass\n")
    done = run(tmp_path, pytest_command("--collect-only", "-q", "--launcher", launcher))
    assert done.stdout.count("::test_") == selected, done.stdout + done.stderr


class FakeJob:
    """A job that has already ended, with what its ranks wrote before."""

    def __init__(self, news: Sequence[str | Verdict], status: int, reports: str = "") -> None:
        self.status = status
        self.reader = self
        self._news = news
        self._reports = reports

    def new(self) -> Sequence[str | Verdict]:
        return self._news

    def output_tail(self) -> str:
        return "the job's last words"

    def reports(self) -> str:
        return self._reports

    def close(self) -> None:
        pass


def hosted(tests: Sequence[str], *jobs: FakeJob) -> dict[str, str | None]:
    """The failures of `tests`, by test, where those jobs run them one after the other."""
    waiting = iter(jobs)
    world = HostedTests(tests, lambda _: next(waiting), patience_s=1)  # type: ignore[arg-type,return-value]
    return {test: world.verdict(test).failure for test in tests}


def passed(test: str) -> list[str | Verdict]:
    return [test, Verdict(test=test, failure=None)]


def failed(test: str) -> list[str | Verdict]:
    return [test, Verdict(test=test, failure=f"{test} is wrong")]


def test_after_a_failure_another_job_runs_the_rest() -> None:
    failures = hosted("abc", FakeJob(passed("a") + failed("b"), 1), FakeJob(passed("c"), 0))
    assert failures == {"a": None, "b": "b is wrong", "c": None}


def test_the_test_under_way_when_a_job_dies_has_failed() -> None:
    failures = hosted("abc", FakeJob([*passed("a"), "b"], 139), FakeJob(passed("c"), 0))
    assert failures["a"] is None
    assert "the job ended with status 139" in str(failures["b"])
    assert "the job's last words" in str(failures["b"])
    assert failures["c"] is None


@pytest.mark.parametrize("news", [["a"], failed("a")], ids=["no verdict", "others noticed"])
def test_a_failure_has_what_the_watchdogs_reported(news: list[str | Verdict]) -> None:
    failures = hosted("ab", FakeJob(news, 1, reports="rank 0 hung"), FakeJob(passed("b"), 0))
    assert "what its watchdogs reported:\nrank 0 hung" in str(failures["a"])
    assert ("a is wrong" in str(failures["a"])) == (len(news) == 2)
    assert failures["b"] is None


@pytest.mark.parametrize("status", [0, 1])
def test_tests_that_a_job_never_ran_have_failed(status: int) -> None:
    failures = hosted("abc", FakeJob(passed("a"), status))
    assert failures["a"] is None
    assert "never run" in str(failures["b"])
    assert "never run" in str(failures["c"])


def test_a_job_that_ends_badly_after_its_last_test_is_red() -> None:
    failures = hosted("ab", FakeJob(passed("a") + passed("b"), 134))
    assert failures["a"] is None
    assert "passed, but then the job ended with status 134" in str(failures["b"])


def test_a_line_that_a_slow_rank_wrote_late_is_not_a_test_under_way() -> None:
    late: list[str | Verdict] = [*passed("a"), "b", "a"]
    assert "no verdict" in str(hosted("ab", FakeJob(late, 1))["b"])


def test_jobs_are_not_started_for_ever() -> None:
    tests = [str(number) for number in range(MOST_JOBS + 2)]
    failures = hosted(tests, *[FakeJob(failed(test), 1) for test in tests[:MOST_JOBS]])
    assert "not run" in str(failures[tests[-1]])
