"""How long a test may take, and what happens then."""

from __future__ import annotations

import contextlib

import pytest

#: Without any limit stated.
_DEFAULT_S = 120.0


def time_limit(item: pytest.Item) -> float:
    """The seconds after which pytest-timeout ends the test; a default where it would not."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.kwargs.get("timeout", *marker.args[:1]))
    return float(item.config.getoption("timeout", None) or _limit_in_file(item) or _DEFAULT_S)


def lift_time_limit(item: pytest.Item) -> None:
    """For a test that runs elsewhere: there its limit holds, here it only waits for its turn."""
    if item.config.pluginmanager.has_plugin("timeout"):
        item.add_marker(pytest.mark.timeout(0), append=False)


def end_from_a_thread(item: pytest.Item) -> None:
    """A process that is stuck inside a C++ call never gets to a Python signal handler."""
    if item.config.pluginmanager.has_plugin("timeout"):
        limit = pytest.mark.timeout(time_limit(item), method="thread")
        item.add_marker(limit, append=False)


def _limit_in_file(item: pytest.Item) -> str | None:
    with contextlib.suppress(ValueError):  # the option does not exist without pytest-timeout
        limit: str | None = item.config.getini("timeout")
        return limit
    return None
