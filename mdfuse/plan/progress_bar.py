"""Progress of work that takes seconds: a bar on a terminal, and a line in a log."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mdfuse.bootstrap import detect, is_behind_mpirun
from mdfuse.errors import BackendError

#: Seconds before it shows: shorter work needs no bar.
DELAY_S = 2.0

#: A line for each piece of work that ends: its name, and its seconds.
_LOG = logging.getLogger("mdfuse.progress")


@contextmanager
def progress(what: str, total: int, shows: bool) -> Iterator[Callable[[], None]]:
    """Show the progress of this context's work on a terminal; yield the function that advances it.

    Args:
        what: the work.
        total: how much there is.
        shows: whether this process shows anything, if it has a terminal.
    """
    begin = time.perf_counter()
    with _bar(what, total, shows) as advance:
        yield advance
    _LOG.info("%s: %.1f s", what, time.perf_counter() - begin)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Show on a terminal, on the first rank alone, that this context's work goes on."""
    with progress(what, 1, _is_first()):
        yield


def _is_first() -> bool:
    try:
        return not detect(os.environ).rank
    except BackendError:  # which says so where ranks meet
        return True


@contextmanager
def _bar(what: str, total: int, shows: bool) -> Iterator[Callable[[], None]]:
    if not shows or not sys.stderr.isatty() or is_behind_mpirun(os.environ):
        yield _nothing
        return
    from rich.console import Console  # slow to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=total)
    timer = threading.Timer(DELAY_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def _nothing() -> None:
    return None
