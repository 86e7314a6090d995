"""The screen: output on rank 0, errors without traceback, progress on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from mdfuse.errors import BackendError, CommunicationError, MdfuseError
from mdfuse.runtime.bootstrap import detect


def is_first() -> bool:
    """This process is rank 0, or its launcher cannot be made out (the command will say so)."""
    try:
        return detect(os.environ).rank == 0
    except BackendError:
        return True


def output() -> Console:
    """Where results go: on rank 0 standard output, elsewhere nowhere. NO_COLOR is honoured."""
    return Console(highlight=False, quiet=not is_first())


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on a terminal what is being waited for."""
    console = Console(stderr=True)
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
        is_one_ranks = isinstance(error, CommunicationError | BackendError)
        fail(Text.assemble((f"{type(error).__name__}: ", "bold red"), str(error)), is_one_ranks)


def fail(why: Text | str, everywhere: bool = False) -> NoReturn:
    """Print why on standard error, on rank 0 or on every rank that gets here; exit status 1."""
    if everywhere or is_first():
        Console(stderr=True, highlight=False, markup=False).print(why, soft_wrap=True)
    raise SystemExit(1)
