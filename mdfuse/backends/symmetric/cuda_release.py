"""End the waits of a GPU for ranks that do not come, so that it goes on, with garbage.

A stream cannot be told to leave a wait, but the words that it waits for can be written. Waits are
for equality, and a word may be awaited with several values by what is queued: each has its turn,
until the device is done. Kernels wait until a flag has reached the number of their turn, modulo
2^32: of two values that are half of that apart one has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.symmetric.cuda_memory import CudaLane
from mdfuse.errors import BackendError
from mdfuse.interpreter import threads

_log = logging.getLogger("mdfuse.comm")

#: How long a value stays, until the device has seen it, seconds.
_SEEN_S = 2e-4

#: How long an idle device may have new work, of a thread that does not know yet, seconds.
_LATE_S = 0.3

#: The longest that all this goes on, seconds.
_MOST_S = 30.0

#: How many new streams are tried until one does not share a queue with a stream that waits, and how
#: long each has, seconds.
_STREAMS, _FREE_S = 32, 0.02

#: Values of flags.
_AHEAD = 1 << 30, 3 << 30


def check_can_end(all_know: bool) -> None:
    """Raise BackendError unless all ranks know that posts are ended.

    What is queued on this rank goes on, and sends garbage that looks like results.
    """
    if not all_know:
        raise BackendError(
            "posts by 'symmetric' cannot be ended",
            because="a rank that lives did not say that it has noted its results",
            hint="the report of that rank says what it waits for",
        )


def end_waits(
    device: CudaDevice,
    lanes: Sequence[CudaLane],
    flags: Sequence[tuple[int, int]],
    new_lane: Callable[[], CudaLane],
) -> None:
    """Let all waits end, until the device is done.

    Args:
        device: of this rank.
        lanes: whose waits, also those in graphs, are ended.
        flags: address and number of words that kernels wait for.
        new_lane: makes a lane.
    """
    device.enter()
    free = _free(new_lane)
    done = threads.start(lambda: _wait(device), "mdfuse-done")
    until, turn = time.monotonic() + _MOST_S, 0
    while not done.join(_SEEN_S):
        if time.monotonic() > until:
            _log.warning("posts by 'symmetric' do not end")
            return
        for word, value in due([pair for lane in lanes for pair in lane.awaited.copy()], turn):
            free.write(word, value)
        for word, count in flags:
            free.fill(word, _AHEAD[turn % 2], count)
        turn += 1


def due(awaited: Iterable[tuple[int, int]], turn: int) -> list[tuple[int, int]]:
    """Return for each word the value whose turn it is.

    >>> due({(8, 0), (8, 5), (16, 3)}, 1)
    [(8, 5), (16, 3)]
    """
    values: dict[int, list[int]] = {}
    for word, value in sorted(awaited):
        values.setdefault(word, []).append(value)
    return [(word, some[turn % len(some)]) for word, some in values.items()]


def _wait(device: CudaDevice) -> None:
    """Return once the device is done, and stays so."""
    device.settle()
    time.sleep(_LATE_S)
    device.settle()


def _event() -> torch.cuda.Event:
    """Return an event behind all work of the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def _free(new_lane: Callable[[], CudaLane]) -> CudaLane:
    """Return a lane that works; the rest share a queue with streams that wait."""
    for _ in range(_STREAMS):
        lane = new_lane()
        mark = lane.make(_event)
        until = time.monotonic() + _FREE_S
        while time.monotonic() < until:
            if mark.query():
                return lane
            time.sleep(1e-4)
    return lane
