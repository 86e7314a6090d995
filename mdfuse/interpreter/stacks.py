"""Read what the threads of this process are doing, from another thread and at no cost to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import FrameType

from mdfuse.interpreter.garbage import no_collection

#: Whether a new object may start a garbage collection on the spot: later versions put it off.
_COLLECTS_AT_ONCE = sys.version_info < (3, 12)


def stacks() -> dict[int, list[FrameType]]:
    """Return the frames of each thread by its number (`Thread.ident`), innermost first.

    No garbage collection begins meanwhile: Python 3.11 makes the object of an outer frame when it
    is first asked for. If that starts a collection, and a finalizer gives up Python's lock, the
    other thread goes on and leaves the very frame: the new object then stands for memory that
    something else uses.
    """
    with no_collection() if _COLLECTS_AT_ONCE else nullcontext():
        return {thread: list(_outwards(top)) for thread, top in sys._current_frames().items()}


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
