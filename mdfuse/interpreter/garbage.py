"""Pauses of Python's garbage collection, and collections that look at new objects only."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pauses:
    """A count of the threads that want no collection now; the last one ends the pause."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._was_on = gc.isenabled()
                gc.disable()

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._was_on:
                gc.enable()


_PAUSES = _Pauses()


@contextmanager
def no_collection() -> Iterator[None]:
    """Let no garbage collection begin by itself, in any thread, until the block ends.

    >>> was_on = gc.isenabled()
    >>> with no_collection():
    ...     print(gc.isenabled())
    False
    >>> gc.isenabled() == was_on
    True
    """
    _PAUSES.begin()
    try:
        yield
    finally:
        _PAUSES.end()


@contextmanager
def quick_collections() -> Iterator[None]:
    """Let collections look only at objects that are made from now on, until the block ends.

    Each capture of a graph begins with a collection, which looks at all objects of all libraries:
    0.1 s. Objects that the program has frozen before stay frozen.

    >>> was_frozen = gc.get_freeze_count() > 0
    >>> with quick_collections():
    ...     print(gc.get_freeze_count() > 0)
    True
    >>> (gc.get_freeze_count() > 0) == was_frozen
    True
    """
    was_frozen = gc.get_freeze_count() > 0
    collected()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def collected() -> None:
    """Collect garbage, and let later collections of `quick_collections` leave out live objects."""
    gc.collect()
    gc.freeze()
