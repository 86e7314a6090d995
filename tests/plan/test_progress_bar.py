"""The bar on a terminal: after a while, on one rank, and nowhere else."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from helpers.stand_in_compiler import until

from mdfuse.plan import progress_bar as module
from mdfuse.plan.progress_bar import progress, stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal(delay_s: float = 0.0, **variables: str) -> Iterator[Terminal]:
    """Put a terminal in the place of standard error, with nothing to wait for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm", **variables}.items():
            patch.setenv(name, value)
        patch.setattr(module, "DELAY_S", delay_s)
        found = Terminal()
        patch.setattr(sys, "stderr", found)  # in the test: pytest has its own between the phases
        yield found


def shows(screen: Terminal, text: str) -> bool:
    """Wait for a text."""
    end = time.monotonic() + 60
    while text not in screen.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    return text in screen.getvalue()


def test_it_shows_how_far_the_work_is() -> None:
    with terminal() as screen:
        with progress("compiling launches", 3, shows=True) as advance:
            assert shows(screen, "0/3") and "compiling launches" in screen.getvalue()
            advance()
            assert shows(screen, "1/3")
        assert shows(screen, "\x1b[?25h")  # the cursor is back


def test_an_error_ends_it() -> None:
    def work(screen: Terminal) -> None:
        with progress("work", 1, shows=True):
            assert shows(screen, "0/1")
            raise ValueError("mine")

    before = threading.active_count()
    with terminal() as screen:
        with pytest.raises(ValueError, match="mine"):
            work(screen)
        assert shows(screen, "\x1b[?25h")
    until(lambda: threading.active_count() == before)


def test_what_is_done_soon_shows_nothing() -> None:
    with terminal(delay_s=3600.0) as screen:
        with progress("work", 1, shows=True) as advance:
            advance()
        assert screen.getvalue() == ""


@pytest.mark.parametrize("case", ["another rank", "a file", "mpirun"])
def test_where_nothing_shows(case: str) -> None:
    variables = {"OMPI_COMM_WORLD_RANK": "0"} if case == "mpirun" else {}
    with terminal(**variables) as screen:
        if case == "a file":
            screen.isatty = lambda: False  # type: ignore[method-assign]
        before = threading.active_count()
        with progress("work", 1, shows=case != "another rank") as advance:
            assert threading.active_count() == before  # nothing will show later either
            advance()
        assert screen.getvalue() == ""


def ranked(rank: int) -> AbstractContextManager[Terminal]:
    """Put a terminal in the place of standard error of one rank of two."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    return terminal(RANK=str(rank), LOCAL_RANK=str(rank), **job)


def test_a_stage_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It shows on the first rank alone."""
    with caplog.at_level("INFO", "mdfuse.progress"):
        with ranked(0) as screen, stage("exporting"):
            assert shows(screen, "exporting")
        with ranked(1) as screen, stage("importing"):
            assert screen.getvalue() == ""
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == ["exporting", "importing"]
    assert all(line.endswith(" s") for line in said)
