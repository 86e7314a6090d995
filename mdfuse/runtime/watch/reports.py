"""Keep reports of broken waits in files, since stderr may be redirected.

A report goes to a file of its own, and to torchrun's, whose summary shows the text of the first
rank that failed. Each error that ends a process goes there, too.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

_log = logging.getLogger("mdfuse.comm")


class Page:
    """A file for one report, made before the report so that the report can name it.

    Args:
        folder: where the file is made; made itself where it is missing. None: there is no file.
        rank: this rank.

    Attributes:
        row: the report's line about the file.
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


#: The variable with the file in which torchrun looks for the error of a failed process.
_FILE = "TORCHELASTIC_ERROR_FILE"

#: torchrun takes the rank with the earliest date, in seconds, for the first. An error caused by
#: another rank's is dated so much later; a rank that ends without a message, as by `sys.exit(1)`,
#: is dated when torchrun sees it.
_BEHIND_S = 3

#: The error that was told last.
_told: list[BaseException] = []


def tell_torchrun(error: BaseException | None) -> None:
    """Write an error to the file that torchrun reads when this process ends.

    It does nothing under other launchers, or without an error. An earlier entry, of torch's
    `record` or of a former error, keeps its date.
    """
    file = os.environ.get(_FILE)
    if not file or not isinstance(error, Exception) or error in _told:
        return
    _told[:] = [error]
    before = _read(file)
    stamp = int(time.time()) if before is None else int(before["extraInfo"]["timestamp"])
    what = f"{type(error).__name__}: {error}"
    if before is None or before["message"] != what:
        stack = "".join(traceback.format_exception(error))
        before = {"message": what, "extraInfo": {"py_callstack": stack}}
    before["extraInfo"]["timestamp"] = str(stamp + (_BEHIND_S if _follows(error) else 0))
    try:
        # at once: torchrun fails where it finds a part of it
        Path(f"{file}.new").write_text(json.dumps({"message": before}), encoding="utf-8")
        os.replace(f"{file}.new", file)
    except OSError as problem:
        _log.warning("the launcher's file cannot be written: %s", problem)


def _follows(error: BaseException | None) -> bool:
    """True if an error, or one of its causes, was caused by another rank's."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if getattr(error, "follows", False):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _read(file: str) -> dict[str, Any] | None:
    """Return the entry of torchrun's file, as torch writes an exception; None: there is none."""
    try:
        message = json.loads(Path(file).read_text(encoding="utf-8"))["message"]
        int(message["extraInfo"]["timestamp"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return message if isinstance(message, dict) and "message" in message else None


def untell_torchrun() -> None:
    """Take back the error told before: this process goes on, and may end by another one."""
    if _told and (file := os.environ.get(_FILE)):
        _told.clear()
        Path(file).unlink(missing_ok=True)


@cache
def tell_torchrun_at_exit() -> None:
    """Arrange to tell torchrun of an error that ends this process unhandled, when it is raised.

    The end of the process would be too late: ranks that wait for this one fail meanwhile.
    """
    if os.environ.get(_FILE):
        sys.excepthook = partial(_tell_first, sys.excepthook)


def _tell_first(
    then: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    tell_torchrun(error)
    then(kind, error, trace)
