"""Disks that are full, folders that nobody may write into, and those that ranks share."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mdfuse as mf


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond some bytes; Python hears of it as an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def failing(moment: str, only: str = "") -> Iterator[None]:
    """Let what concerns files fail at a moment.

    Args:
        moment: "write", "fsync", "open", "folder" (it cannot be made), or "rename".
        only: of files whose names have this in them ("open" and "rename").
    """
    if moment == "write":
        with room(300):
            yield
        return
    errors = {"open": errno.EROFS, "folder": errno.EACCES}
    owner: Any = os if moment == "fsync" else Path
    name = {"folder": "mkdir", "rename": "replace"}.get(moment, moment)
    before = getattr(owner, name)

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if owner is Path and only not in self.name:
            return before(self, *args, **kwargs)
        number = errors.get(moment, errno.ENOSPC)
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        yield


def shared_folder(comm: mf.Communicator, tmp_path: Path, key: str) -> Path:
    """A folder of rank 0's, on all ranks."""
    if comm.rank == 0:
        comm.store.set(key, str(tmp_path))
    return Path(comm.store.get(key).decode())
