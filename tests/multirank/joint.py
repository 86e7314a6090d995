"""The session of one rank among several: the ranks run each test together and agree on it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from mdfuse.bootstrap import Launch
from multirank.agreement import Agreement
from multirank.process import this_process
from multirank.time_limits import end_from_a_thread, time_limit
from multirank.verdicts import Verdict, VerdictWriter

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator

#: A communication that does not finish fails after this long: half of the time that a test has, so
#: that it fails with its own message.
COMMUNICATION_TIMEOUT_S = 60.0


class JointSession:
    """Runs this rank's part of the tests.

    At a failure the session stops on every rank: what the failed test left under way (a collective
    that only some ranks entered) would meet the next test's communications.

    Attributes:
        launch: this process's rank and the world's size.

    Args:
        config: the run's.
        launch: see above.
        reports: the folder for verdicts where another pytest hosts this world, else None.
    """

    def __init__(self, config: pytest.Config, launch: Launch, reports: Path | None) -> None:
        self._config = config
        self.launch = launch
        self._writer = VerdictWriter(reports, launch.rank)
        self._communicator: Communicator | None = None
        self._agreement: Agreement | None = None
        self._executed = 0
        self._status = 0
        self._writer.exists(this_process(launch.rank))
        if launch.rank > 0:
            _silence(config)

    @property
    def communicator(self) -> Communicator:
        assert self._communicator is not None, "there is no communicator before the first test"
        return self._communicator

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            end_from_a_thread(item)

    def pytest_internalerror(self, excrepr: object) -> None:
        if self.launch.rank > 0:  # rank 0's reporter prints its own
            self._shout(f"internal error on rank {self.launch.rank}:\n{excrepr}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Meet the other ranks; pytest's own loop then runs the tests."""
        if session.config.option.collectonly or not (session.items or session.testsfailed):
            return
        import mdfuse
        from mdfuse.config import options_from_environment

        options = replace(options_from_environment(), timeout_s=COMMUNICATION_TIMEOUT_S)
        self._communicator = mdfuse.init(options)
        self._agreement = Agreement(self.communicator.store, self.launch.rank, self.launch.size)
        self._agree_on_tests(session)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        verdict = self._run(item, nextitem)
        for report in verdict.reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if verdict.failure is not None:
            item.session.shouldfail = f"the ranks stop at a failure: {item.nodeid}"
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A run that executed fewer tests than it selected is not a good one."""
        selected = len(getattr(session, "items", ()))
        if self._executed < selected and not exitstatus and not session.config.option.collectonly:
            self._shout(f"{self._executed} of {selected} tests were executed")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._status = int(session.exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        _set_abort_status(self._status)
        if self._agreement is None:
            return
        if self._status:
            self._leave_badly(self._agreement)
        self._agreement.meet_last()
        self.communicator.close()

    def _agree_on_tests(self, session: pytest.Session) -> None:
        """Ranks that collected different tests would run different ones against each other."""
        names = "\n".join(item.nodeid for item in session.items)
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        own = f"{len(session.items)} tests ({digest}), {session.testsfailed} errors"
        answers = self._agreement_of("collection", own, patience_s=COMMUNICATION_TIMEOUT_S)
        if len(set(answers.values())) > 1:
            listing = "\n".join(f"  rank {rank}: {text}" for rank, text in answers.items())
            pytest.exit(f"the ranks did not collect the same tests\n{listing}", returncode=1)

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> Verdict:
        self._writer.started(item.nodeid)
        start = time.perf_counter()
        own = _own_failure(runtestprotocol(item, nextitem=nextitem, log=False))
        answers = self._agreement_of(
            f"test{self._executed}", own or "", patience_s=0.75 * time_limit(item)
        )
        self._executed += 1
        seconds = time.perf_counter() - start
        verdict = Verdict(test=item.nodeid, failure=_joined(answers), seconds=seconds)
        if None in answers.values():
            self._give_up(verdict, answers)
        if self.launch.rank == 0:
            self._writer.settled(verdict)
        return verdict

    def _agreement_of(self, name: str, own: str, patience_s: float) -> dict[int, str | None]:
        assert self._agreement is not None
        return self._agreement.settle(name, own, patience_s)

    def _give_up(self, verdict: Verdict, answers: dict[int, str | None]) -> NoReturn:
        """Some rank gives no answer, so nobody can go on: report, and take the whole job down.

        Rank 0 may be the one that is stuck, so the first rank that did answer reports.
        """
        assert self._agreement is not None
        if self.launch.rank == min(r for r, text in answers.items() if text is not None):
            stacks = self._agreement.stacks_of(r for r, text in answers.items() if text is None)
            whole = f"{verdict.failure}\n{stacks}"
            self._writer.settled(Verdict(test=verdict.test, failure=whole, seconds=verdict.seconds))
            self._shout(f"{verdict.test} failed\n{whole}")
        else:
            self._agreement.linger()
        _exit_job(1)

    def _leave_badly(self, agreement: Agreement) -> NoReturn:
        """Leave without the usual goodbyes: communications may still be under way.

        Rank 0 goes first: a launcher ends the job at the first rank that exits with an error, and
        rank 0 is the one with something to print.
        """
        if self.launch.rank == 0:
            agreement.announce_reported()
        else:
            agreement.await_reported()
        _exit_job(self._status)

    def _shout(self, text: str) -> None:
        """Write to the real stderr, on any rank."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            sys.stderr.write(f"\n[rank {self.launch.rank}] {text}\n")
            sys.stderr.flush()


def _silence(config: pytest.Config) -> None:
    """Let the reporter of a rank that is not rank 0 write nowhere."""
    config.pluginmanager.unregister(name="terminalreporter")
    nowhere = open(os.devnull, "w")  # noqa: SIM115  lives as long as the process
    config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")


def _own_failure(reports: list[pytest.TestReport]) -> str | None:
    """What is wrong with this rank's run of a test; anything but passed is."""
    texts = [_text_of(report) for report in reports if report.outcome != "passed"]
    surprises = [report for report in reports if report.passed and hasattr(report, "wasxfail")]
    texts += [f"{report.when}: passed, but is marked xfail" for report in surprises]
    return "\n".join(texts) or None


def _text_of(report: pytest.TestReport) -> str:
    """A line that says what happened, then all the rest."""
    where = "" if report.when == "call" else f"{report.when}: "
    if report.skipped:
        how = "is marked xfail" if hasattr(report, "wasxfail") else "skipped itself"
        rule = "a multi-rank test runs or is deselected, so that a run of too few tests shows"
        return f"{where}{how}\n{report.longrepr}\n{rule}"
    crash = getattr(report.longrepr, "reprcrash", None)
    headline = crash.message.partition("\n")[0] if crash else "failed"
    sections = [f"--- {name} ---\n{text}" for name, text in report.sections]
    return "\n".join([f"{where}{headline}", report.longreprtext, *sections])


def _joined(answers: dict[int, str | None]) -> str | None:
    """One text of all ranks' failures, equal ones once; None where every rank passed."""
    ranks: dict[str, list[int]] = {}
    for rank, text in answers.items():
        if text:
            ranks.setdefault(text, []).append(rank)
    silent = [rank for rank, text in answers.items() if text is None]
    headlines = [f"{_named(group)}: {text.splitlines()[0]}" for text, group in ranks.items()]
    headlines += [f"{_named(silent)}: no verdict"] if silent else []
    bodies = [f"=== {_named(group)} ===\n{text}" for text, group in ranks.items()]
    return "\n".join([*headlines, "", *bodies]) if headlines else None


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _set_abort_status(status: int) -> None:
    """Where MPI is in use, a bad end must abort: its Finalize waits for ranks that never come."""
    if status and "mpi4py.MPI" in sys.modules:
        from mpi4py.run import set_abort_status

        set_abort_status(status)


def _exit_job(status: int) -> NoReturn:
    """End this process now, and through MPI the others; other launchers end them by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        mpi.COMM_WORLD.Abort(status)
    os._exit(status)
