"""Where a report of a wait that broke goes besides stderr, which others may have redirected.

A file of its own, and torchrun's: its summary shows what the first rank to fail wrote there.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

from mdfuse.errors import MdfuseError

_log = logging.getLogger("mdfuse.comm")


class Page:
    """A file for one report, made before the report so that this can name it.

    Args:
        folder: where; made where there is none. None: there is no file.
        rank: this rank.

    Attributes:
        row: what the report says of the file.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.row = ""
        self._file: Path | None = None
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(".txt", f"rank{rank}-pid{os.getpid()}-", folder)
            os.close(number)
        except OSError as error:
            self.row = f"no file has this report: {error}"
        else:
            self._file, self.row = Path(name), f"this report is in {name}"

    def write(self, text: str) -> None:
        """Write the report; stderr has it, too, so that a full disk is only logged."""
        if self._file is not None:
            try:
                self._file.write_text(f"{text}\n", encoding="utf-8")
            except OSError as error:
                _log.warning("a report cannot be written to %s: %s", self._file, error)


def folder_of(setting: str | None) -> Path:
    """Where reports go: `Options.reports`, else a folder of this user's for temporary files."""
    return Path(setting or Path(tempfile.gettempdir(), f"mdfuse-{os.getuid()}"))


def tell_torchrun(error: BaseException) -> None:
    """Write an error to the file that torchrun reads when this process ends; elsewhere nothing.

    Its summary prints the text of the traceback, so there must be one.
    """
    # takes 24 ms, and only processes that fail need it
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error
    except type(error):
        try:
            get_error_handler().record_exception(error)
        except OSError as problem:
            _log.warning("the launcher's file cannot be written: %s", problem)


@cache
def tell_torchrun_at_exit() -> None:
    """Do so for an error of mdfuse that nobody handles."""
    atexit.register(_tell_the_last)


def _tell_the_last() -> None:
    failure = getattr(sys, "last_value", None)
    if isinstance(failure, MdfuseError):
        tell_torchrun(failure)
