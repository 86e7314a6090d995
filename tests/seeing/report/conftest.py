"""Tests in a browser: left out, with the reason, where there is none."""

from __future__ import annotations

import shutil

import pytest

_LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.get_closest_marker("browser")]
    if not mine or shutil.which("chromium"):
        return
    config.stash[_LEFT_OUT] = len(mine)
    config.hook.pytest_deselected(items=mine)
    items[:] = [item for item in items if item not in mine]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count = terminalreporter.config.stash.get(_LEFT_OUT, 0)
    if count:
        why = "no chromium: apt-get install --no-install-recommends chromium"
        terminalreporter.write_line(f"{count} tests in a browser are left out: {why}")
