"""Models of torchvision: left out, with the reason, where that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

_LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.get_closest_marker("torchvision")]
    if not mine or find_spec("torchvision"):
        return
    config.stash[_LEFT_OUT] = len(mine)
    config.hook.pytest_deselected(items=mine)
    items[:] = [item for item in items if item not in mine]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count = terminalreporter.config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"{count} tests of torchvision's models are left out: no such")
