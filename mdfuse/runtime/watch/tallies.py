"""The counts of runs of all programs: the posts in runs that are over."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable

from mdfuse.layouts.kinds import KINDS
from mdfuse.runtime.watch.plan_position import RunCount

#: A family of posts, and the team that numbers them together.
Key = tuple[str, tuple[int, ...]]


def key_of(kind: str, team: tuple[int, ...]) -> Key:
    """Return the family and the team with which a post is numbered."""
    return ("collectives" if KINDS[kind].by_all else "transfers"), team


class Tallies:
    """The counts of runs, each as long as its owner lives, and the sums of posts of the others.

    Args:
        gone: is called with a count whose owner is gone, in any thread.
    """

    def __init__(self, gone: Callable[[RunCount], object] = lambda tally: None) -> None:
        self._gone = gone
        self._live: dict[int, RunCount] = {}
        self._over: deque[int] = deque()
        self._posted: Counter[Key] = Counter()
        self._lock = threading.Lock()

    def add(self, tally: RunCount, owner: object) -> None:
        """Add the count of a program whose runs begin; it goes when its owner does."""
        self._live[id(tally)] = tally
        weakref.finalize(owner, self._end, id(tally)).atexit = False

    def __bool__(self) -> bool:
        return bool(self._live)

    def posted_before(self, now: RunCount | None) -> Counter[Key]:
        """Return the number of posts of each family and team in runs that are over.

        Args:
            now: the count of the program that is running; None: there is none.
        """
        with self._lock:
            self._fold()
            counts = self._posted.copy()
            for tally in list(self._live.values()):
                _count(counts, tally, tally.runs - (tally is now))
        return counts

    def _end(self, tally: int) -> None:
        """Note that an owner is gone.

        The collector of garbage calls this in any thread, at any line: also within the lock.
        """
        self._over.append(tally)
        if self._lock.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._lock.release()

    def _fold(self) -> None:
        """Add the posts of programs that are gone, within the lock."""
        while self._over:
            tally = self._live.pop(self._over.popleft())
            _count(self._posted, tally, tally.runs)
            self._gone(tally)


def _count(counts: Counter[Key], tally: RunCount, runs: int) -> None:
    for (kind, team), count in tally.posted.items():
        counts[key_of(kind, team)] += (runs - tally.refused) * count
