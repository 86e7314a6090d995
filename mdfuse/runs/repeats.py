"""Runs with arguments like those of the run before: all that each of them asks, in one function.

It stands between the caller and a replay, so it makes as few calls as it can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch import is_autocast_enabled, is_grad_enabled

from mdfuse.caching import Cache
from mdfuse.plan.runnable import Runnable
from mdfuse.runtime.watch.running import RunCount

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator

#: Runs with arguments, and returns the outputs; None where they need a closer look.
Again = Callable[[Sequence[Any]], "list[Any] | None"]


def never(arguments: Sequence[Any]) -> list[Any] | None:
    """Return None: nothing was run before."""
    return None


def repeated(
    plan: Runnable,
    *,
    is_like: Callable[[Sequence[Any]], bool],
    apart_at: Callable[[Sequence[Any]], tuple[int, ...] | None] | None,
    cache: Cache[Runnable],
    key: Hashable,
    are_numbers: Callable[[Sequence[Any]], bool] | None,
    is_captured: Callable[[], bool] | None,
    guarded: Callable[..., list[Any]],
    is_alone: bool,
    communicator: Communicator,
    tally: RunCount,
    lock: threading.Lock,
) -> Again:
    """Return what runs a plan again.

    Args:
        plan: the plan.
        is_like: tells of arguments whether they are surely of the kind that the plan is for.
        apart_at: returns where arguments lie if what is written is apart; None: nothing is written.
        cache: where the plan may still be, which counts its use.
        key: of the plan, there.
        are_numbers: tells whether the numbers among arguments are of their kinds; None: there are
            none.
        is_captured: tells whether the caller captures a graph that cannot hold a run; None: none is
            such.
        guarded: runs the plan with all that numbers, communications and autocast need.
        is_alone: no other rank has to do with a run.
        communicator: on which it runs.
        tally: counts runs.
        lock: held while the plan runs.
    """
    run, device_type = plan.run, communicator.device.type
    is_plain = is_alone and not plan.numbers

    def again(arguments: Sequence[Any]) -> list[Any] | None:
        with lock:  # a plan's buffers serve one run at a time
            if not communicator.is_ready or not is_like(arguments):
                return None
            if is_captured is not None and is_captured():
                return None
            at = None
            if apart_at is not None and (at := apart_at(arguments)) is None:
                return None
            if plan.records and is_grad_enabled():
                return None
            if are_numbers is not None and not are_numbers(arguments):
                return None
            if cache.recent is plan:  # `again` without the call
                cache.hits += 1
            elif not cache.again(key, plan):
                return None
            if is_plain and not is_autocast_enabled(device_type):
                tally.runs += 1
                return run(arguments, None, at)
            return guarded(arguments, None, at)

    return again
