"""Fixtures of tests that run on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator


@pytest.fixture(scope="session")
def comm(request: pytest.FixtureRequest) -> Communicator:
    """This rank's communicator. All tests of a world share it, and the session closes it."""
    communicator: Communicator = request.config.pluginmanager.getplugin(
        "multirank-joint"
    ).communicator
    return communicator
