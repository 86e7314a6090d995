"""Print to the terminal: output on rank 0, errors without traceback, progress."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from mdfuse.bootstrap import detect, is_behind_mpirun
from mdfuse.cli.user_code import UserCodeError
from mdfuse.errors import BackendError, CommunicationError, MdfuseError

#: How much later than rank 0 other ranks fail, seconds: launchers stop all ranks when one fails,
#: and rank 0 must have said why before.
_GRACE_S = 1.0


def is_first() -> bool:
    """Return whether this process prints: rank 0, or one whose launcher variables are wrong."""
    try:
        return detect(os.environ).rank == 0
    except BackendError:
        return True


def prepare() -> None:
    """Make stdout and stderr print characters that their encoding lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def output() -> Console:
    """Return the console for results: standard output on rank 0, a silent one elsewhere."""
    return _console(quiet=not is_first())


def _console(**settings: Any) -> Console:
    """Return a console; with NO_COLOR (https://no-color.org), one without escape sequences."""
    if os.environ.get("NO_COLOR") or is_behind_mpirun(os.environ):
        settings |= {"color_system": None, "force_terminal": False}
    return Console(highlight=False, markup=False, **settings)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show on a terminal the task that this context waits for."""
    console = _console(stderr=True)
    if not is_first() or not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield


@contextmanager
def errors() -> Iterator[None]:
    """End the process with exit status 1 and no traceback on an error of mdfuse in this context.

    Rank 0 prints errors that all ranks raise alike; other errors are printed by the rank that
    raised them.
    """
    try:
        yield
    except MdfuseError as error:
        from mdfuse.runtime.watch.reports import tell_torchrun  # torch is slow to import

        tell_torchrun(error)
        is_one_ranks = isinstance(error, CommunicationError | BackendError | UserCodeError)
        fail(Text.assemble((f"{type(error).__name__}: ", "bold red"), str(error)), is_one_ranks)


def fail(why: Text | str, everywhere: bool = False) -> NoReturn:
    """End the process with exit status 1; print why on standard error, on rank 0 or everywhere."""
    if everywhere or is_first():
        _console(stderr=True).print(why, soft_wrap=True)
    else:
        time.sleep(_GRACE_S)
    raise SystemExit(1)
