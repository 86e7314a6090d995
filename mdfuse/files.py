"""Files that are whole or not there, and folders that nobody else writes into."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mdfuse.errors import ProgramError, shown


class NewFile:
    """A file under way, which keeps the first error of the system's.

    Torch's writer, which calls it, raises an error of its own in the place of that one.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all bytes."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Hand the written bytes to the system."""
        try:
            self._file.flush()
        except OSError as error:
            self.error = self.error or error
            raise

    def tell(self) -> int:
        """The number of bytes written."""
        return self._file.tell()


@contextmanager
def new_file(path: Path) -> Iterator[Any]:
    """Yield a `NewFile`, in a folder that is made; after the block it is on the disk.

    Raises:
        ProgramError: it cannot be written; nothing is left of it then.
    """
    file: NewFile | None = None
    is_whole = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as raw:
            file = NewFile(raw)
            yield file
            file.flush()
            os.fsync(raw.fileno())  # some file systems find here alone that they are full
        is_whole = True
    except (OSError, RuntimeError) as error:
        first = error if file is None or file.error is None else file.error
        if not isinstance(first, OSError):
            raise
        raise _unwritable(path, first) from error
    finally:
        if file is not None and not is_whole:
            remove(path)


def put(part: Path, path: Path) -> None:
    """Rename a complete file, replacing one of that name.

    Raises:
        ProgramError: it cannot be renamed.
    """
    try:
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def remove(*paths: Path) -> None:
    """Remove incomplete files after an error, as far as possible."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _unwritable(path: Path, error: OSError) -> ProgramError:
    return ProgramError(
        f"{path} cannot be written",
        because=str(error),
        hint="a folder with room, which all ranks may write into",
    )


def private_folder(folder: Path) -> None:
    """Make a folder that this user alone can read and write; one that is there becomes so.

    Raises:
        PermissionError: it has another owner, or others could have written into it.
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder)
    if stat.S_IMODE(folder.stat().st_mode) != 0o700:
        folder.chmod(0o700)


def check_private(folder: Path) -> None:
    """Raise PermissionError where others than this user may have put files into a folder.

    Users who may write into the parent folder could replace it, so that must be this user's or
    root's. A group may write there, since some systems let each user's group do so everywhere; a
    folder that somebody else put there has another owner.

    Raises:
        PermissionError: they may.
        OSError: it is not there.
    """
    me, around = os.geteuid(), folder.parent
    about = around.stat()
    for whose in {around.lstat().st_uid, about.st_uid} - {me, 0}:  # of a link, and of its end
        raise PermissionError(f"{around} is user {whose}'s, and this is user {me}")
    if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
        raise PermissionError(f"everybody may write into {around}")
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise PermissionError(f"{folder} is a link or a file, and no folder")
    if about.st_uid != me:
        raise PermissionError(f"{folder} is user {about.st_uid}'s, and this is user {me}")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write into {folder}: remove it")


def as_path(place: object) -> Path:
    """Return the path that a caller names.

    Raises:
        ProgramError: it is no path, or one that no system has.
    """
    path = os.fspath(place) if isinstance(place, str | os.PathLike) else None
    if not isinstance(path, str) or "\0" in path:
        raise ProgramError(
            f"the path {shown(place)}",
            because="a path is text, or a pathlib.Path, without a zero character",
            hint='for example "checkpoints/step-1"',
        )
    return Path(path)
