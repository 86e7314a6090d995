"""Tests on two hosts: left out, with the reason, unless asked for where hosts can be made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOSTS = Path(__file__).with_name("two_hosts")

_REASON = pytest.StashKey[str]()


def why_not(config: pytest.Config) -> str | None:
    """Why these tests do not run; None where they do."""
    if "hosts" not in config.option.markexpr:
        return "they were not asked for (pytest -m hosts tests/namespaces)"
    done = subprocess.run([HOSTS, "--check"], capture_output=True, text=True)
    return None if done.returncode == 0 else (done.stderr.strip() or "they cannot be made here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == HOSTS.parent]
    reason = why_not(config) if mine else None
    if reason is None:
        return
    config.stash[_REASON] = f"{len(mine)} tests on two hosts are left out: {reason}"
    config.hook.pytest_deselected(items=mine)
    items[:] = [item for item in items if item not in mine]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reason = terminalreporter.config.stash.get(_REASON, None)
    if reason is not None:
        terminalreporter.write_line(reason)
