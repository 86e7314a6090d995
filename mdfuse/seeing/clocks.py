"""Clocks of several ranks: how far each is from that of rank 0, by asking it often."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns, time_ns
from typing import Protocol

#: How often a rank asks; the quickest answer counts.
_TIMES = 20


class Store(Protocol):
    """The part of a store that is used here: keys and values that all ranks share."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


def offset(
    store: Store,
    rank: int,
    size: int,
    clock: Callable[[], int] = perf_counter_ns,
    unix: Callable[[], int] = time_ns,
) -> tuple[int, int]:
    """Return what to add to this rank's clock to get rank 0's unix time, and the error, in ns.

    All ranks call it. Rank 0 answers the others in turn. A question and its answer take some time;
    rank 0 read its clock somewhere in between, so the error is at most half of it (Cristian 1989).

    Args:
        store: shared by all ranks; nobody else uses its keys.
        rank: this rank.
        size: the number of ranks.
        clock: the clock that is to be aligned, nanoseconds.
        unix: the time that rank 0 answers with, nanoseconds.
    """
    if rank == 0:
        start = clock()
        here = unix()
        end = clock()
        for other in range(1, size):
            _answer(store, other, unix)
        return here - (start + end) // 2, (end - start) // 2
    found = [_ask(store, rank, n, clock) for n in range(_TIMES)]
    trip, best = min(found)
    return best, trip // 2


def _answer(store: Store, other: int, unix: Callable[[], int]) -> None:
    for n in range(_TIMES):
        store.get(f"{other}/{n}/ask")
        store.set(f"{other}/{n}/answer", str(unix()))


def _ask(store: Store, rank: int, n: int, clock: Callable[[], int]) -> tuple[int, int]:
    """Ask once; return how long it took, and the offset."""
    start = clock()
    store.set(f"{rank}/{n}/ask", "")
    there = int(store.get(f"{rank}/{n}/answer"))
    end = clock()
    for key in ("ask", "answer"):
        store.delete_key(f"{rank}/{n}/{key}")
    return end - start, there - (start + end) // 2
