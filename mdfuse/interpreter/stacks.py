"""Read the stacks of this process's threads, from another thread and at no cost to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FrameType
from typing import TypeVar

from mdfuse.interpreter.garbage import no_collection

#: Whether a new object may start a garbage collection on the spot: later versions put it off.
_COLLECTS_AT_ONCE = sys.version_info < (3, 12)

_T = TypeVar("_T")


def seen(look: Callable[[FrameType], _T]) -> dict[int, list[_T]]:
    """Return the results of a function on the frames of each thread, innermost first.

    A frame keeps alive its function's variables, also when that function has returned, and the
    variables of this thread hold the frames themselves. So no frame outlives this function: a
    tensor would stay until the next garbage collection, and torch copies a gradient that somebody
    holds.

    No garbage collection begins meanwhile: Python 3.11 makes the object of an outer frame when it
    is first asked for. If that starts a collection, and a finalizer gives up Python's lock, the
    other thread goes on and leaves the very frame: the new object then refers to memory that has
    another use.

    Args:
        look: takes a frame, and returns nothing that holds it.

    Returns:
        Its results, by the number of the thread (`Thread.ident`).
    """
    with no_collection() if _COLLECTS_AT_ONCE else nullcontext():
        tops = sys._current_frames()
        try:
            return {thread: [look(x) for x in _outwards(top)] for thread, top in tops.items()}
        finally:
            tops.clear()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
