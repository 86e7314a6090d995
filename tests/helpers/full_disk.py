"""Disks that are full, and folders that nobody may write into."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


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
