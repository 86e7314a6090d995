"""What was posted outside torch.distributed: the last posts, in a ring buffer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from mdfuse.backends.noting import Subject


class Post(NamedTuple):
    """One entry of the ring.

    Attributes:
        place: its number among all posts of this process.
        sequence: its number in its family and team, from 1.
        subject: what it is.
        is_done: whether the post of a sequence number is done.
        posted_at: seconds, on the watch's clock.
    """

    place: int
    sequence: int
    subject: Subject
    is_done: Callable[[int], bool]
    posted_at: float

    def text(self) -> str:
        """As reports name it."""
        subject = self.subject
        return f"{subject.kind} #{self.sequence} ({subject.where})"


class Ring:
    """The last posts; writing one costs 0.2 us, reading them is for reports.

    Args:
        size: how many, a power of two; more than the launch queue of a GPU takes (1,024).
        clock: seconds.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        assert size & (size - 1) == 0
        self._entries: list[tuple[Any, ...] | None] = [None] * size
        self._clock = clock
        self._next = count().__next__
        self._tallies: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def writer(self, subject: Subject, is_done: Callable[[int], bool]) -> Callable[[], int]:
        """A function that notes a post of `subject` and returns its sequence number."""
        entries, mask, following, clock = (
            self._entries,
            len(self._entries) - 1,
            self._next,
            self._clock,
        )
        tally = self._tallies.setdefault((subject.family, subject.team), [0])

        def write() -> int:
            number = tally[0] = tally[0] + 1
            place = following()
            entries[place & mask] = (place, number, subject, is_done, clock())
            return number

        return write

    def posts(self, after: int = -1) -> list[Post]:
        """The last posts, of those with a place above `after`, oldest first."""
        entries = list(self._entries)
        return sorted(Post(*e) for e in entries if e is not None and e[0] > after)

    def tallies(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """How many were posted, by family and team."""
        return {key: tally[0] for key, tally in list(self._tallies.items())}
