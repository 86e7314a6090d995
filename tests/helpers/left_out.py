"""Tests that need what is not everywhere: left out there, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def hooks(marker: str, is_there: Callable[[], object], why: str) -> tuple[Any, Any]:
    """The hooks of a conftest that deselects tests with a marker, and says so at the end.

    Args:
        marker: of the tests.
        is_there: whether what they need is there.
        why: what is said of them where it is not, behind how many they are.
    """
    count = pytest.StashKey[int]()

    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        mine = [item for item in items if item.get_closest_marker(marker)]
        if not mine or is_there():
            return
        config.stash[count] = len(mine)
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        found = terminalreporter.config.stash.get(count, 0)
        if found:
            terminalreporter.write_line(f"{found} {why}")

    return pytest_collection_modifyitems, pytest_terminal_summary
