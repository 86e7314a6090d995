"""What all tests share: the plugin that runs some of them on several ranks, and hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import settings

pytest_plugins = ("multirank.plugin",)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Times are not asserted; and ranks must draw the same examples as each other."""
    settings.register_profile("one process", deadline=None)
    settings.register_profile("ranks", deadline=None, derandomize=True, database=None)
    is_rank = session.config.pluginmanager.has_plugin("multirank-joint")
    settings.load_profile("ranks" if is_rank else "one process")
