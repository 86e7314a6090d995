"""Options, markers, and the choice between hosting a world and being part of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mdfuse.bootstrap import detect
from multirank import selection
from multirank.hosting import Host
from multirank.joint import JointSession
from multirank.launchers import LAUNCHERS, choose_launcher, marked_backends


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    group = parser.getgroup("multirank", "tests on several ranks")
    group.addoption(
        "--launcher",
        choices=["auto", *LAUNCHERS],
        default="auto",
        help="what hosts the ranks of multi-rank tests in a plain pytest run",
    )
    group.addoption(
        "--rank-reports",
        type=Path,
        metavar="FOLDER",
        help="internal: where the ranks of a hosted world write their verdicts",
    )
    if not pluginmanager.has_plugin("pytest_mpi"):
        group.addoption("--with-mpi", action="store_true", help="accepted, as pytest-mpi does")


# Last: the session of a rank that is not rank 0 replaces the reporter that pytest configures.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in selection.MARKERS:
        config.addinivalue_line("markers", marker)
    launch = detect(os.environ)
    reports: Path | None = config.getoption("rank_reports")
    if launch.size > 1 or reports is not None:
        config.pluginmanager.register(JointSession(config, launch, reports), "multirank-joint")
        size, backends = launch.size, {os.environ.get("MDFUSE_BACKEND", "")}
    else:
        launcher = choose_launcher(config.getoption("launcher"))
        config.pluginmanager.register(Host(config, launcher), "multirank-host")
        size, backends = None, marked_backends(launcher)
    chosen = selection.Selection(config, size, backends)
    config.pluginmanager.register(chosen, "multirank-selection")
