"""Write files that are whole, or not there: what a full disk does is told with the path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mdfuse.errors import ProgramError


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
        """Hand what was written to the system."""
        try:
            self._file.flush()
        except OSError as error:
            self.error = self.error or error
            raise

    def tell(self) -> int:
        """How many bytes were written."""
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
    """Give a file that is whole its name, in the place of one that has it.

    Raises:
        ProgramError: that cannot be.
    """
    try:
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def remove(*paths: Path) -> None:
    """Remove what is left of files after an error, as far as that is possible: it is of no use."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _unwritable(path: Path, error: OSError) -> ProgramError:
    return ProgramError(
        f"{path} cannot be written",
        because=str(error),
        hint="a folder with room, which all ranks may write into",
    )
