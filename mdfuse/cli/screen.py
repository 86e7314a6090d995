"""The screen: output on rank 0, errors without traceback, progress on a terminal."""

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

from mdfuse.bootstrap import detect
from mdfuse.cli.user_code import UserCodeError
from mdfuse.errors import BackendError, CommunicationError, MdfuseError

#: How much later than rank 0 other ranks fail, seconds: launchers stop all ranks when one fails,
#: and rank 0 is to say why before that.
_GRACE_S = 1.0


def is_first() -> bool:
    """Whether this process prints: rank 0 does, and so does one whose launcher is unknown."""
    try:
        return detect(os.environ).rank == 0
    except BackendError:
        return True


def prepare() -> None:
    """What a terminal's encoding lacks is shown as an escape, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def output() -> Console:
    """Where results go: on rank 0 standard output, elsewhere nowhere."""
    return _console(quiet=not is_first())


def _console(**settings: Any) -> Console:
    """With NO_COLOR (https://no-color.org) there are no escape sequences at all."""
    if os.environ.get("NO_COLOR") or _is_behind_mpirun():
        settings |= {"color_system": None, "force_terminal": False}
    return Console(highlight=False, markup=False, **settings)


def _is_behind_mpirun() -> bool:
    """Open MPI gives a rank's output a terminal of its own, even when it ends in a file."""
    return any(name.startswith("OMPI_COMM_WORLD_") for name in os.environ)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on a terminal what is being waited for."""
    console = _console(stderr=True)
    if not is_first() or not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield


@contextmanager
def errors() -> Iterator[None]:
    """Errors of mdfuse end the process with exit status 1 and no traceback.

    Rank 0 prints what all ranks raise alike; what may happen to one rank alone, that rank prints.
    """
    try:
        yield
    except MdfuseError as error:
        _tell_launcher(error)
        is_one_ranks = isinstance(error, CommunicationError | BackendError | UserCodeError)
        fail(Text.assemble((f"{type(error).__name__}: ", "bold red"), str(error)), is_one_ranks)


def _tell_launcher(error: MdfuseError) -> None:
    from mdfuse.runtime.watch.reports import tell_torchrun  # torch is slow to import

    tell_torchrun(error)


def fail(why: Text | str, everywhere: bool = False) -> NoReturn:
    """Print why on standard error, on rank 0 or on every rank that gets here; exit status 1."""
    if everywhere or is_first():
        _console(stderr=True).print(why, soft_wrap=True)
    else:
        time.sleep(_GRACE_S)
    raise SystemExit(1)
