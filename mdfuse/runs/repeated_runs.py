"""Runs with arguments like those of the run before: all of their checks in one function.

It stands between the caller and a replay, so it makes as few calls as it can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch import is_autocast_enabled, is_grad_enabled

from mdfuse.caching import Cache
from mdfuse.plan.runnable import Runnable
from mdfuse.plan.signature import Lasting, Signature
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.torch_private import current_raw_stream

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator

#: Runs with arguments, and returns the outputs; None where they need a closer look.
Again = Callable[[Sequence[Any]], "list[Any] | None"]


def never(arguments: Sequence[Any]) -> list[Any] | None:
    """Return None: nothing was run before."""
    return None


def repeated(
    plan: Runnable,
    arguments: Sequence[Any],
    signature: Signature,
    *,
    cache: Cache[Runnable],
    key: Hashable,
    may_run: Callable[[Sequence[Any]], bool] | None,
    guarded: Callable[..., list[Any]],
    is_alone: bool,
    communicator: Communicator,
    tally: RunCount,
    lock: threading.Lock,
) -> Again:
    """Return the function that runs a plan again.

    Args:
        plan: the plan, found in this run.
        arguments, signature: the arguments it was made for, and the reader of their kind.
        cache, key: the cache that may still hold the plan, and counts its use.
        may_run: see `permission`.
        guarded: runs the plan with the guards for numbers, communications and autocast.
        is_alone: no other rank takes part in a run.
        communicator: of the runs.
        tally, lock: the counter of runs, and the lock held while the plan runs.
    """
    where = signature.like(arguments)
    if where is None:
        return never
    run, quick, stream, device = plan.run, plan.quick, signature.stream(), signature.device
    is_plain = is_alone and not plan.numbers and not is_autocast_enabled(communicator.device.type)
    may_overlap, are_apart, stream_of = plan.may_overlap, signature.are_apart, current_raw_stream
    last, lasting, where_first = where(arguments), None, signature.first_like(arguments)

    def again(given: Sequence[Any]) -> list[Any] | None:
        nonlocal last, lasting
        with lock:  # a plan's buffers serve one run at a time
            if not communicator.is_ready or (device is not None and stream_of(device) != stream):
                return None
            at = where(given) if given is not lasting else where_first(given) and last
            if at is None or (may_run is not None and not may_run(given)):
                return None
            if at != last:
                if may_overlap and not are_apart(given, None):
                    return None
                last = at
            at = last  # which plans recognise by identity
            lasting = given if type(given) is Lasting else None
            if cache.recent is plan:  # `again` without the call
                cache.hits += 1
            elif not cache.again(key, plan):
                return None
            if is_plain:
                tally.runs += 1
                if quick is not None and (results := quick(given, at)) is not None:
                    return results
                return run(given, None, at)
            return guarded(given, None, at)

    return again


def permission(
    plan: Runnable,
    are_numbers: Callable[[Sequence[Any]], bool] | None,
    is_captured: Callable[[], bool] | None,
) -> Callable[[Sequence[Any]], bool] | None:
    """Return a test whether arguments like those before may run; None: all may.

    Args:
        plan: the plan.
        are_numbers: tests whether the numbers among arguments are of their kinds; None: there are
            none.
        is_captured: tests whether the caller captures a graph that cannot hold a run; None: any
            graph can.
    """
    if not plan.records and are_numbers is None and is_captured is None:
        return None

    def may_run(given: Sequence[Any]) -> bool:
        if is_captured is not None and is_captured():
            return False
        if plan.records and is_grad_enabled():
            return False
        return are_numbers is None or are_numbers(given)

    return may_run
