"""Fixtures of tests that run on several ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.stand_in_compiler import StandIn

    from mdfuse.runtime.communicator import Communicator


@pytest.fixture(scope="session")
def comm(request: pytest.FixtureRequest) -> Communicator:
    """This rank's communicator. All tests of a world share it, and the session closes it."""
    communicator: Communicator = request.config.pluginmanager.getplugin(
        "multirank-joint"
    ).communicator
    return communicator


_folders = count()


@pytest.fixture
def compiler(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """What stands for Inductor on all ranks; no compilation goes on before all have begun one."""
    from helpers.stand_in_compiler import StandIn

    from mdfuse.plan import compilation

    key = f"compiler of a test/{next(_folders)}"
    if comm.rank == 0:
        comm.store.set(key, tempfile.mkdtemp())
    found = StandIn(Path(comm.store.get(key).decode()), comm.size)
    found.install(monkeypatch)
    compilation._MADE.empty()
    yield found
    compilation._MADE.empty()
    comm.all_ok(None)
    if comm.rank == 0:
        shutil.rmtree(found.folder)
