"""The process as its watchdog shows it in reports, and ends it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import FrameType

from mdfuse.errors import PACKAGE, Source
from mdfuse.interpreter.stacks import seen

#: The exit status of a process that the watchdog ends (sysexits.h: EX_SOFTWARE).
EXIT_STATUS = 70

#: Folders of code that is not the user's, besides installed packages.
_LIBRARIES = (PACKAGE, sys.base_prefix + "/lib/", "<")


def host_line() -> str:
    """Return the main thread's innermost line outside mdfuse, packages and Python's library."""
    lines = seen(_line).get(threading.main_thread().ident or 0, [])
    line = next((x for x in lines if _is_users(x.file)), lines[0] if lines else None)
    return "" if line is None else line.quote()


def _line(frame: FrameType) -> Source:
    # a frame between two lines has no line
    return Source(frame.f_code.co_filename, frame.f_lineno or 0)


def _is_users(file: str) -> bool:
    return "site-packages" not in file and not file.startswith(_LIBRARIES)


def write_error(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def end_process(status: int) -> None:
    """End the process at once: an orderly exit would wait for the device, which hangs."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)
