"""A progress bar on a terminal for work that takes seconds."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mdfuse.bootstrap import is_behind_mpirun

#: Seconds before it shows: shorter work needs no bar.
DELAY_S = 2.0


@contextmanager
def progress(what: str, total: int, shows: bool) -> Iterator[Callable[[], None]]:
    """Show the progress of this context's work on a terminal; yield the function that advances it.

    Args:
        what: the work.
        total: how much there is.
        shows: whether this process shows anything, if it has a terminal.
    """
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
