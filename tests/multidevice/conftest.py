"""Fixtures of tests that run on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import mdfuse


@pytest.fixture(scope="session")
def comm(request: pytest.FixtureRequest) -> mdfuse.Communicator:
    """This rank's communicator. All tests of a world share it, and the session closes it."""
    communicator: mdfuse.Communicator = request.config.pluginmanager.getplugin(
        "multirank-joint"
    ).communicator
    return communicator
