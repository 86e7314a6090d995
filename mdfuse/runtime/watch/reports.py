"""Keep reports of waits that broke in files, since stderr may be redirected.

A report goes to a file of its own, and to torchrun's, whose summary shows what the first rank to
fail wrote there.
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
    """A file for one report, made before the report so that the report can name it.

    Args:
        folder: where the file is made; made itself where it is missing. None: there is no file.
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
        """Write the report; a failure is only logged, since stderr has the report, too."""
        if self._file is not None:
            try:
                self._file.write_text(f"{text}\n", encoding="utf-8")
            except OSError as error:
                _log.warning("a report cannot be written to %s: %s", self._file, error)


def folder_of(setting: str | None) -> Path:
    """Return the folder for reports: `Options.reports`, else a temporary folder of this user."""
    return Path(setting or Path(tempfile.gettempdir(), f"mdfuse-{os.getuid()}"))


def tell_torchrun(error: BaseException) -> None:
    """Write an error to the file that torchrun reads when this process ends.

    Does nothing under other launchers. torchrun's summary prints the traceback, so the error is
    raised here to have one.
    """
    # imported here: it takes 24 ms, and only processes that fail need it
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
    """Arrange to tell torchrun of an error of mdfuse that ends this process unhandled."""
    atexit.register(_tell_the_last)


def _tell_the_last() -> None:
    failure = getattr(sys, "last_value", None)
    if isinstance(failure, MdfuseError):
        tell_torchrun(failure)
