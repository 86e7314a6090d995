"""Waiting for MPI's requests, with a deadline.

MPI moves data only while it is called. A wait therefore tests and gives the processor away in turn
(`os.sched_yield`): ranks may outnumber cores. MPI's own wait could not be left again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Waiting:
    """The deadline of waits, and a count by which another thread ends them.

    Attributes:
        timeout_s: deadline, seconds.
        aborted: how often another thread ended the waits that were under way.
    """

    timeout_s: float
    aborted: int = 0


#: Requests that were dropped before they ended, and their buffers, which MPI may still use.
_KEPT: list[object] = []


@dataclass(slots=True, kw_only=True)
class State:
    """State of a team: broken once a post failed, as its members may then be at different ones."""

    is_broken: bool = False


def poll(is_done: Callable[[], bool], waiting: Waiting) -> None:
    """Return once `is_done()`, giving the processor away between looks.

    Raises:
        RuntimeError: the deadline has passed, or another thread ended the wait.
    """
    if is_done():
        return
    deadline, before = time.monotonic() + waiting.timeout_s, waiting.aborted
    while not is_done():
        os.sched_yield()
        if waiting.aborted != before:
            raise RuntimeError("the wait was ended: another rank does not take part")
        if time.monotonic() >= deadline:
            raise RuntimeError(f"not done within {waiting.timeout_s:g} s of the wait")


@dataclass(slots=True, eq=False)
class Requests:
    """The requests of one post, and the buffers that MPI uses meanwhile.

    Attributes:
        referenced: objects that must live until the requests are done.
        state: of the team; a wait that fails sets it to broken.
        error: the exception of a wait that failed.
    """

    requests: Sequence[Any]
    referenced: object
    waiting: Waiting
    state: State
    error: RuntimeError | None = None

    def wait(self) -> None:
        """Return once all are done; a second wait returns at once.

        Raises:
            RuntimeError: MPI reports an error (`MPI.Exception` is one), or see `poll`; a second
                wait raises it again.
        """
        if self.error is not None:
            raise self.error
        if not self.requests:
            return
        try:
            poll(self._test(), self.waiting)
        except RuntimeError as error:
            self.error = error
            self.state.is_broken = True
            raise
        self.requests, self.referenced = (), None

    def __del__(self) -> None:
        """Keep the buffers of requests that may be under way still.

        That is so after an error between post and wait, or after a wait that failed.
        """
        if self.requests:
            _KEPT.append((self.requests, self.referenced))

    def _test(self) -> Callable[[], bool]:
        first, *others = self.requests
        test: Callable[[], bool] = first.Test
        return (lambda: type(first).Testall(self.requests)) if others else test
