"""Compiled functions in files, which the processes of a host share and later ones find.

A function is two files under one name: the compiler's output, and, written last, a description of
it with a checksum. Files are written under another name and renamed. A damaged file counts as
absent. The process that compiles holds a lock of the operating system, which ends with the process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mdfuse.errors import reason
from mdfuse.files import check_private, private_folder
from mdfuse.plan import inductor
from mdfuse.plan.compiled_functions import Function, WithConstants, parts_of
from mdfuse.plan.lifted_constants import decoded, encoded
from mdfuse.plan.tensor_meta import Form

_LOG = logging.getLogger("mdfuse.compile")

#: How long a process that waits for another one sleeps between looks, seconds.
_POLL_S = 0.02


class UnreadableError(Exception):
    """Files of a function that are damaged, or that the compiler does not take."""


@dataclass(frozen=True, slots=True)
class Artefacts:
    """A folder of compiled functions; it is made when the first one is locked or saved."""

    folder: Path

    def load(self, name: str) -> tuple[Function, list[Form]] | None:
        """Return a function and the forms of its results; None where there are no files of it.

        Raises:
            UnreadableError: there are, and they are of no use.
        """
        try:
            about = self._described(name)
            forms = [_form(*x) for x in about["results"]]
            function = inductor.load(self._code(name))
            constants = tuple(decoded(about["constants"]))
            return WithConstants(function, constants) if constants else function, forms
        except FileNotFoundError:
            return None
        except Exception as error:  # any error of reading half a file, or of the compiler
            raise UnreadableError(reason(error)) from error

    def has(self, name: str) -> bool:
        """Return whether there are files of a function, and they are whole."""
        try:
            self._described(name)
        except Exception:  # likewise
            return False
        return True

    def _described(self, name: str) -> Any:
        """Return the description of a function.

        Raises:
            Exception: there is none, or it does not fit the compiler's output.
        """
        self._guard(check_private)
        about = json.loads(self._about(name).read_bytes())
        if _checksum(self._code(name)) != about["sha256"]:
            raise ValueError("the checksum is another one")
        return about

    def save(self, name: str, function: Function, results: Sequence[Form]) -> str | None:
        """Write a function into its files; return why it cannot be."""
        part = self.folder / f".{name}.{os.getpid()}"
        try:
            self._guard(private_folder)
            code, constants = parts_of(function)
            inductor.save(code, part)
            forms = [[x[0], x[1], str(x[2])[len("torch.") :], str(x[3])] for x in results]
            about = {"sha256": _checksum(part), "results": forms, "constants": encoded(constants)}
            part.replace(self._code(name))
            part.write_text(json.dumps(about))
            part.replace(self._about(name))
        except Exception as error:  # the compiler raises its own errors, beside those of files
            return reason(error)
        finally:
            _remove(part)
        return None

    @contextmanager
    def lock(self, name: str, timeout_s: float) -> Iterator[bool]:
        """Be the one process that makes a function in this context; tell whether this one is.

        Args:
            name: the function's.
            timeout_s: how long to wait for a process that has the lock.

        Raises:
            OSError: there can be no lock in this folder, or others may write into it.
        """
        from filelock import FileLock, Timeout  # slow to import

        self._guard(private_folder)
        lock = FileLock(self.folder / f"{name}.lock")
        try:
            lock.acquire(timeout=timeout_s, poll_interval=_POLL_S)
        except Timeout:
            yield False
            return
        except NotImplementedError as error:  # some file systems have no locks
            raise OSError(str(error)) from error
        try:
            yield True
        finally:
            lock.release()

    def remove_parts(self, process: int) -> None:
        """Remove what a process that was ended had written of a function."""
        for part in self.folder.glob(f".*.{process}"):
            _remove(part)

    def _guard(self, act: Callable[[Path], None]) -> None:
        """Make the folder, or check it; log once that other users may write into it."""
        try:
            act(self.folder)
        except PermissionError as error:
            _refuse(str(error))
            raise

    def _code(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _about(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def artefacts() -> Artefacts | None:
    """Return the folder of compiled functions; None where the compiler is to keep no files."""
    folder = inductor.folder()
    return None if folder is None else Artefacts(folder / "mdfuse")


@cache
def _refuse(why: str) -> None:
    """Log once that a folder is not used."""
    _LOG.warning("compiled functions are neither read nor kept: %s", why)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remove(path: Path) -> None:
    """Remove a file that may not be there, or in a folder where nothing can be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _form(shape: list[int], strides: list[int], dtype: str, device: str) -> Form:
    kind: Any = getattr(torch, dtype)
    return tuple(shape), tuple(strides), kind, torch.device(device)
