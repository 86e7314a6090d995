"""Clocks of several ranks: the offset of each from rank 0's clock, by asking it often."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import perf_counter_ns, time_ns

from mdfuse.torch_private import Store

#: How often a rank asks; the quickest answer counts.
_TIMES = 20


def offset(
    store: Store,
    rank: int,
    size: int,
    clock: Callable[[], int] = perf_counter_ns,
    unix: Callable[[], int] = time_ns,
    timeout_s: float | None = None,
) -> tuple[int, int]:
    """Return the offset from this rank's clock to rank 0's unix time, and the error, in ns.

    All ranks call it. Rank 0 answers the others in turn. A question and its answer take some time;
    rank 0 read its clock somewhere in between, so the error is at most half of it (Cristian 1989).

    Args:
        store: shared by all ranks; nobody else uses its keys.
        rank: this rank.
        size: the number of ranks.
        clock: the clock that is to be aligned, nanoseconds.
        unix: the time that rank 0 answers with, nanoseconds.
        timeout_s: how long to wait for another rank, each time; None: as long as the store does.

    Raises:
        RuntimeError: as the store raises it, where another rank does not come in time.
    """

    def get(key: str) -> bytes:
        if timeout_s is not None:
            store.wait([key], timedelta(seconds=timeout_s))
        return store.get(key)

    if rank == 0:
        offsets = [_look(clock, unix) for _ in range(_TIMES)]
        for other in range(1, size):
            _answer(store, get, other, unix)
        trip, best = min(offsets)
        return best, trip // 2
    offsets = [_ask(store, get, rank, n, clock) for n in range(_TIMES)]
    trip, best = min(offsets)
    return best, trip // 2


_Get = Callable[[str], bytes]


def _look(clock: Callable[[], int], unix: Callable[[], int]) -> tuple[int, int]:
    """Read both clocks of rank 0; return the time that it took, and the offset."""
    start = clock()
    now = unix()
    end = clock()
    return end - start, now - (start + end) // 2


def _answer(store: Store, get: _Get, other: int, unix: Callable[[], int]) -> None:
    for n in range(_TIMES):
        get(f"{other}/{n}/ask")
        store.set(f"{other}/{n}/answer", str(unix()))


def _ask(store: Store, get: _Get, rank: int, n: int, clock: Callable[[], int]) -> tuple[int, int]:
    """Ask once; return the round trip, and the offset."""
    start = clock()
    store.set(f"{rank}/{n}/ask", "")
    there = int(get(f"{rank}/{n}/answer"))
    end = clock()
    for key in ("ask", "answer"):
        store.delete_key(f"{rank}/{n}/{key}")
    return end - start, there - (start + end) // 2
