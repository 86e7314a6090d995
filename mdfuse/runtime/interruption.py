"""Raise the error of a device that hangs in the program, so that survivors can go on.

The program then waits in a read of a result, such as `float(loss)`: no line of mdfuse runs that
could raise. Where `mdfuse.rebuild` is possible, the watchdog does not end the process, but
1. lets Python raise the error in the main thread, which it does once the read is back;
2. notes how many runs of each state the device has done: later versions are not whole;
3. waits until all ranks that live have done the same: they may get garbage from here afterwards;
4. ends the posts of the device: it goes on, with garbage in their buffers, and the read is back.
A main thread that does not take the error in time waits for something else: the process ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol
from weakref import WeakSet

from mdfuse.backends.base import Releasing
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.post_notes import Track
from mdfuse.bootstrap import Launch
from mdfuse.errors import BackendError, reason
from mdfuse.interpreter.threads import within
from mdfuse.runtime.membership import why_no_survivors

_log = logging.getLogger("mdfuse.comm")

#: How long the main thread may take to come back from a read, seconds.
_TAKEN_S = 10.0

#: How long posts that others have made, too, may take to end by themselves, seconds.
_PATIENCE_S = 2.0

#: How many runs the host may be ahead of the device with a state whose versions are known.
_AHEAD = 8


class DeviceRuns:
    """The runs of a state that a device has done; any thread may ask at any time.

    A version of the state is whole once the run that makes it is done.

    Args:
        gpu: the device.

    Attributes:
        thread: which made the last run; None: there was none.
        last: the last version that was whole when posts were ended; None: none were.
    """

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self._tracks: dict[int, Track] = {}
        self._queued: deque[tuple[int, Track]] = deque(maxlen=_AHEAD)
        self.thread: int | None = None
        self.last: int | None = None
        with _guard:
            _all_runs.add(self)

    def mark(self, version: int) -> None:
        """Queue a mark behind a run on the current stream."""
        stream = self._gpu.current_stream()
        track = self._tracks.get(stream)
        if track is None:
            track = self._tracks[stream] = self._gpu.track(stream)
        track.mark(version)
        self._queued.append((version, track))
        self.thread = threading.get_ident()

    def freeze(self) -> None:
        """Note the last version that is whole: posts are about to be ended."""
        queued = [*self._queued]  # the program's thread may go on meanwhile
        if self.last is None and queued:
            before = queued[0][0] - 1 if len(queued) < _AHEAD else -1  # else nobody knows
            self.last = max([n for n, x in queued if x.is_done(n)], default=before)

    def lose(self) -> None:
        """Note that nobody knows which versions are whole."""
        self.last = -1


#: The runs of all states on GPUs, and the lock for adding some and listing all.
_all_runs: WeakSet[DeviceRuns] = WeakSet()
_guard = threading.Lock()


def _every() -> list[DeviceRuns]:
    with _guard:
        return [*_all_runs]


class _Convening(Protocol):
    """The parts of a watch that an interruption needs."""

    def meet(self) -> bool:
        """Return whether all ranks that live know that posts are ended."""

    def come(self) -> bool:
        """Tell others that versions are noted; return False where they did not wait for that."""


class _Interrupted(Protocol):
    """The parts of a communicator that an interruption needs."""

    is_ready: bool
    is_sound: bool
    size: int
    launch: Launch

    @property
    def watch(self) -> _Convening:
        """Return its watch."""

    @property
    def door(self) -> object | None:
        """Return how it was joined; None: it was not."""

    def carriers(self) -> Collection[object]:
        """Return its backends."""


def can_rebuild(ranks: _Interrupted) -> bool:
    """Return whether the ranks that are left can go on where one is lost."""
    is_alone = ranks.door is None or ranks.size == 1
    return not is_alone and why_no_survivors(ranks.launch, os.environ) is None


def _freeze() -> None:
    for runs in _every():
        runs.freeze()


class Interruption:
    """The interruption of a program by its watchdog, at most once for a communicator.

    Args:
        ranks: the communicator.
        thread: in which programs run; by default the main one.

    Attributes:
        is_over: the program has an error.
        is_standing_by: no run begins any more.
    """

    def __init__(self, ranks: _Interrupted, thread: threading.Thread | None = None) -> None:
        self._ranks, self._thread = ranks, thread or threading.main_thread()
        self._lock = threading.Lock()
        self.is_over = self.is_standing_by = False

    def can_begin(self) -> bool:
        """Return whether the program can have the error: it has a state, and runs in one thread."""
        threads = {runs.thread for runs in _every()} - {None}
        releasing = [isinstance(x, Releasing) for x in self._ranks.carriers()]
        is_known = threads == {self._thread.ident} and self._thread.is_alive()
        return is_known and all(releasing) and can_rebuild(self._ranks)

    def begin(self, error: BackendError) -> bool:
        """Raise an error in the thread, and end the posts of the device.

        A thread that handles another one already, of its own, gets no second one.

        Returns:
            False where the thread does not take it; True where it has, or has another one.
        """
        with self._lock:
            if self.is_over:
                return True
            self.is_over = True
            has_own = not self._ranks.is_sound and not self.is_standing_by
            self._ranks.is_ready = self._ranks.is_sound = False
            is_handling = has_own and handles(self._thread)
            taken = None if is_handling else raise_in(self._thread, error)
            is_released = self._release()
        return is_released if taken is None else taken.wait(_TAKEN_S)

    def cancel(self, settled: Callable[[], object]) -> None:
        """End what is under way on the device, before survivors meet; the thread has an error.

        Garbage that the device still sends could reach buffers that others use anew.

        Args:
            settled: returns once the device has done all posts, if it ever has.
        """
        with self._lock:
            is_first, self.is_over = not self.is_over, True
            is_settled = within(_PATIENCE_S, settled, "mdfuse-settle")
            if is_first and is_settled:
                self._come()
            elif is_first:
                self._release()
                is_settled = within(_PATIENCE_S, settled, "mdfuse-settle")
        if not is_settled:
            _log.warning("the device still works on posts that were to end")

    def stand_by(self) -> None:
        """Let no run begin, and note whole versions; the second call tells others.

        The program may have begun a run before the first call.
        """
        was, self.is_standing_by = self.is_standing_by, True
        self._ranks.is_ready = self._ranks.is_sound = False
        _freeze()
        if was:
            self._come()

    def check_goes_on(self) -> None:
        """Raise BackendError where no run may begin."""
        if self.is_over or self.is_standing_by:
            raise BackendError(
                "posts of other ranks were ended",
                because="a communication hung on a rank, and nobody gets results any more",
                hint="mdfuse.rebuild(error) goes on with the ranks that are left",
            )

    def _come(self) -> bool:
        """Tell others that versions are noted; return False where they did not wait for that."""
        is_awaited = self._ranks.watch.come()
        if not is_awaited:  # the device may have gone on, with garbage
            for runs in _every():
                runs.lose()
        return is_awaited

    def _release(self) -> bool:
        """Note versions, let others do so, and end posts; return whether all backends do."""
        _freeze()
        all_know = self._ranks.watch.meet()
        # others that did not wait may use the buffers anew that posts of this rank write to
        all_know, is_released = self._come() and all_know, True
        for backend in self._ranks.carriers():
            try:
                if isinstance(backend, Releasing):
                    backend.release(all_know)
            except Exception as error:  # the posts of the others have to end, too
                _log.warning("posts that cannot be ended: %s", reason(error))
                is_released = False
        return is_released


def handles(thread: threading.Thread) -> bool:
    """Return whether a thread is in an `except` or `finally` of a BackendError."""
    active: Any = sys._current_exceptions().get(thread.ident or 0)
    error = active[1] if isinstance(active, tuple) else active  # a tuple before Python 3.12
    while error is not None and not isinstance(error, BackendError):
        error = error.__context__
    return error is not None


def raise_in(thread: threading.Thread, error: BackendError) -> threading.Event:
    """Let Python raise an error in a thread, once that is back from a call of C.

    Python takes a class: so this makes one that is raised as the error.

    Returns:
        the event that it was raised.
    """
    taken = threading.Event()

    class InThread(BackendError):
        def __init__(self) -> None:
            super().__init__(
                error.what, where=error.where, because=error.because, hint=error.hint,
                follows=error.follows,
            )  # fmt: skip
            taken.set()

    InThread.__name__ = InThread.__qualname__ = BackendError.__name__
    InThread.__module__ = BackendError.__module__
    _set_error(thread, InThread)
    return taken


def _set_error(thread: threading.Thread, kind: type[BaseException]) -> None:
    set_error: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_error(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
