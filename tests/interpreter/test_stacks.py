"""The stacks of other threads."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import pytest

from mdfuse.interpreter.garbage import no_collection
from mdfuse.interpreter.stacks import seen
from mdfuse.runtime.agreement.concurrent_runs import crowd
from mdfuse.runtime.watch import process
from mdfuse.runtime.watch.plan_position import running


def _deep(depth: int, here: threading.Event, leave: threading.Event) -> None:
    if depth:
        _deep(depth - 1, here, leave)
        return
    here.set()
    leave.wait()


@contextmanager
def _parked(depth: int) -> Iterator[int]:
    """A thread that waits in so many calls; its number."""
    here, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=_deep, args=(depth, here, leave))
    thread.start()
    here.wait()
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        leave.set()
        thread.join()


def _code(frame: FrameType) -> CodeType:
    return frame.f_code


def test_frames_of_a_thread_innermost_first() -> None:
    with _parked(3) as thread:
        names = seen(lambda frame: frame.f_code.co_name)[thread]
    assert names[: names.index("_deep")] == ["wait", "wait"]
    assert names[2:6] == ["_deep"] * 4 and names[-1] == "_bootstrap"
    assert thread not in seen(_code)


def test_this_thread_is_one_of_them() -> None:
    assert test_this_thread_is_one_of_them.__code__ in seen(_code)[threading.get_ident()]


class _Value:
    """Something that a function's variables hold."""


def _fails(frame: FrameType) -> None:
    raise ValueError("no look")


def _look_that_fails() -> None:
    with pytest.raises(ValueError, match="no look"):
        seen(_fails)


LOOKS: dict[str, Callable[[], object]] = {
    "frames": lambda: seen(_code),
    "an error": _look_that_fails,
    "threads that communicate": lambda: crowd(0),
    "a plan's step": running,
    "the user's line": process.host_line,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_nothing_lives_on_behind_a_look(look: Callable[[], object]) -> None:
    """What a function held goes when it returns, not with the next garbage collection."""

    def holds() -> weakref.ref[_Value]:
        value = _Value()
        look()
        return weakref.ref(value)

    with no_collection():
        assert holds()() is None


def _callers() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_qualname
        frame = frame.f_back


def test_no_collection_begins_while_frames_are_made() -> None:
    within: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        within.append("_outwards" in _callers())

    before = gc.get_threshold()
    with _parked(300) as thread:
        gc.callbacks.append(note)
        gc.set_threshold(1)
        try:
            found = len(seen(_code)[thread])
            kept = [[] for _ in range(10)]
        finally:
            gc.set_threshold(*before)
            gc.callbacks.remove(note)
    assert found > 300 and len(kept) == 10 and gc.isenabled()
    assert within  # collections did begin, before or after
    if sys.version_info < (3, 12):  # later versions begin none where an object is made
        assert not any(within)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        seen(_code)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_pause_lasts_until_all_who_asked_for_it_have_left() -> None:
    first, second = no_collection(), no_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
