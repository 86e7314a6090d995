"""Waiting for MPI's requests, with a deadline.

MPI moves data only while it is called. A wait therefore tests and gives the processor away in turn
(`os.sched_yield`): ranks may outnumber cores. MPI's own wait could not be left again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any


def poll(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until it is done; False where it is not within `timeout_s`."""
    if is_done():
        return True
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


class Requests:
    """The requests of one post, and the buffers that MPI uses meanwhile.

    Args:
        requests: one or more of mpi4py's.
        kept: what must live until they are done.
        timeout_s: deadline of a wait.
        abandoned: where it goes if it fails: MPI may still read and write the buffers then.
    """

    __slots__ = ("_abandoned", "_error", "_kept", "_requests", "_timeout_s")

    def __init__(
        self, requests: Sequence[Any], kept: object, timeout_s: float, abandoned: list[Any]
    ) -> None:
        self._requests = requests
        self._kept = kept
        self._timeout_s = timeout_s
        self._abandoned = abandoned
        self._error: RuntimeError | None = None

    def wait(self) -> None:
        """Return once all are done; a second wait returns at once.

        Raises:
            RuntimeError: MPI reports an error (`MPI.Exception` is one), or the deadline has passed;
                a second wait raises it again.
        """
        if self._error is not None:
            raise self._error
        if not self._requests:
            return
        try:
            if not poll(self._test(), self._timeout_s):
                raise RuntimeError(f"not done within {self._timeout_s:g} s of the wait")
        except RuntimeError as error:
            self._error = error
            self._abandoned.append(self)
            raise
        self._requests, self._kept = (), None

    def _test(self) -> Callable[[], bool]:
        first, *others = self._requests
        test: Callable[[], bool] = first.Test
        return (lambda: type(first).Testall(self._requests)) if others else test
