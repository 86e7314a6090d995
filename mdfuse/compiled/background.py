"""A save that a thread makes while steps go on, and its error, which all ranks raise alike."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mdfuse.errors import BackendError, user_source, working_for
from mdfuse.interpreter import threads
from mdfuse.runtime.aside import Aside, aside_of
from mdfuse.runtime.communicator import Communicator
from mdfuse.runtime.deadline import NEVER, Deadline

_LOG = logging.getLogger("mdfuse.save")

#: A state that is copied: its tensors, None where this rank has none.
Tensors = Sequence[Tensor | None]


class Copies:
    """Copies of a state in the host's memory, which the next save uses again.

    Those of a GPU are in pinned memory, and made by the GPU while the host goes on.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor | None] = []

    def of(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Begin to copy a state; return a function that waits for the copies and returns them."""
        before = [*self._copies, *[None] * len(tensors)]
        copies = self._copies = [_copied(x, y) for x, y in zip(tensors, before, strict=False)]
        device = next((x.device for x in tensors if x is not None and x.is_cuda), None)
        if device is None:
            return lambda: copies
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))

        def arrived() -> Tensors:
            event.synchronize()
            return copies

        return arrived


def _copied(x: Tensor | None, memory: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor, in the memory of an earlier one where it fits."""
    if x is None:
        return None
    if memory is None or memory.shape != x.shape or memory.dtype != x.dtype:
        memory = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return memory.copy_(x.detach(), non_blocking=True)


class SaveUnderWay:
    """A save in a thread.

    Ranks do not fail in the same moment. So where one has failed, the threads agree after which
    call of the step all raise: calls that no rank has begun wait until they have.

    Args:
        comm: of the ranks that save.
        aside: the same, as the thread meets them.
        what: the action in words.
        act: saves; it meets the other ranks by what it is given.
    """

    def __init__(
        self, comm: Communicator, aside: Aside, what: str, act: Callable[[Aside], None]
    ) -> None:
        self._act, self._comm, self._aside, self._what = act, comm, aside, what
        self._aside.deadline = NEVER
        self._lock, self._decided = threading.Lock(), threading.Event()
        self._calls, self._last = 0, 0
        self._error: Exception | None = None
        self._process, self._source = os.getpid(), user_source()
        self._is_failing = self.is_over = False
        comm.at_end[f"save {id(self)}"] = self._end
        self._job = threads.start(self._run, "mdfuse-save")

    def _run(self) -> None:
        before = working_for.set(self._source)  # the thread is used again
        try:
            self._act(self._aside)
        except Exception as error:
            self._fail(error)
        working_for.reset(before)
        if self._error is None:  # an error stays until it is raised, or logged at the end
            self._finish()
        del self._act

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._is_failing = True
        self._aside.deadline = Deadline.after(self._comm.timeout_s)
        try:
            if not isinstance(error, BackendError):
                self._last = max(int(x or 0) for x in self._aside.all_ok(str(self._calls)))
        except BackendError as late:
            late.__context__ = error
            error = late
        self._error = error
        self._decided.set()

    def enter(self) -> None:
        """Begin a call that all ranks make alike; raise the error of the save where all do."""
        with self._lock:
            if not self._is_failing:
                self._calls += 1
                return
        self._decided.wait()
        if self._calls >= self._last:
            self._raise()
        self._calls += 1

    def settle(self) -> None:
        """Wait for its end, on all ranks, and raise its error."""
        if self._process != os.getpid():
            return  # this is a fork, without the thread
        self._aside.deadline = Deadline.after(self._comm.timeout_s)
        self._job.join()
        self._raise()

    def _finish(self) -> None:
        self.is_over = True
        self._comm.at_end.pop(f"save {id(self)}", None)

    def _raise(self) -> None:
        self._finish()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        """Wait for the end of a save as the communicator is closed; nobody hears of an error."""
        try:
            self.settle()
        except Exception as error:
            if not getattr(error, "follows", False):
                _LOG.error("rank %d could not %s: %s", self._comm.rank, self._what, error)


class Saver:
    """The saves of a step; one at a time is under way."""

    def __init__(self) -> None:
        self._copies = Copies()
        self._aside: tuple[Communicator, Aside] | None = None
        self.under_way: SaveUnderWay | None = None

    def enter(self) -> None:
        """Begin a call; see `SaveUnderWay`."""
        save = self.under_way
        if save is not None:
            self._forget_after(save, save.enter)

    def settle(self) -> None:
        """Wait for the save under way, on all ranks.

        Raises:
            Exception: its error.
        """
        save = self.under_way
        if save is not None:
            self._forget_after(save, save.settle)
            self.under_way = None

    def copies(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Begin to copy a state; see `Copies.of`."""
        return self._copies.of(tensors)

    def begin(self, comm: Communicator, what: str, act: Callable[[Aside], None]) -> None:
        """Begin a save in a thread, on all ranks; see `SaveUnderWay`."""
        if self._aside is None or self._aside[0] is not comm:
            self._aside = comm, aside_of(comm)
        self.under_way = SaveUnderWay(comm, self._aside[1], what, act)

    def _forget_after(self, save: SaveUnderWay, act: Callable[[], None]) -> None:
        try:
            act()
        finally:
            if save.is_over:
                self.under_way = None
