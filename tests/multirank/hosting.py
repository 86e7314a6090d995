"""Plain pytest: it hosts the worlds of multi-rank tests, one per size and backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from multirank.job import HostedTests, Job
from multirank.launchers import Launcher, environment_of_ranks
from multirank.selection import backend_of, world_of
from multirank.time_limits import lift_time_limit, time_limit

#: Beyond a test's own time limit: what starting a world may take on a busy machine.
_START_S = 60.0


class Host:
    """Reports multi-rank tests as this session's own.

    Args:
        config: the run's.
        launcher: starts the ranks.
    """

    def __init__(self, config: pytest.Config, launcher: Launcher) -> None:
        self._config = config
        self._launcher = launcher
        self._worlds: dict[tuple[int, str], HostedTests] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        worlds: dict[tuple[int, str], list[pytest.Item]] = {}
        for item in session.items:
            if size := world_of(item):
                worlds.setdefault((size, backend_of(item)), []).append(item)
        for (size, backend), items in worlds.items():
            self._worlds[size, backend] = self._hosted(size, backend, items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        size = world_of(item)
        if size is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._worlds[size, backend_of(item)].verdict(item.nodeid).reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_unconfigure(self) -> None:
        for world in self._worlds.values():
            world.close()

    def _hosted(self, size: int, backend: str, items: list[pytest.Item]) -> HostedTests:
        chosen = {"MDFUSE_BACKEND": backend} if backend else {}
        patience_s = max(map(time_limit, items)) + _START_S
        for item in items:
            lift_time_limit(item)

        def launch(tests: Sequence[str]) -> Job:
            def command(reports: Path, arguments: Path) -> list[str]:
                return self._launcher(size, self._pytest_arguments(reports, arguments))

            return Job(command, tests, self._config.rootpath, environment_of_ranks() | chosen)

        return HostedTests([item.nodeid for item in items], launch, patience_s)

    def _pytest_arguments(self, reports: Path, tests: Path) -> list[str]:
        option = self._config.option
        arguments = [
            f"--rootdir={self._config.rootpath}",
            f"--rank-reports={reports}",
            f"--tb={option.tbstyle}",
            "--color=no",  # mpirun gives its ranks terminals
            *["-v"] * option.verbose,
            *["-q"] * -option.verbose,
            *["-p", "no:cacheprovider"],  # the ranks would write into one folder
        ]
        if self._config.inipath is not None:
            arguments += ["-c", str(self._config.inipath)]
        for override in option.override_ini or ():
            arguments += ["-o", override]
        # what the tests' own conftest adds, where it does
        arguments += [f"--default={text}" for text in getattr(option, "default", ())]
        arguments += ["--launches"] * getattr(option, "launches", False)
        arguments += ["--whole"] * getattr(option, "whole", False)
        if getattr(option, "timeout", None) is not None:
            arguments += [f"--timeout={option.timeout}"]
        return [*arguments, f"@{tests}"]
