"""A ring buffer of the last posts outside torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from mdfuse.backends.post_notes import PostInfo


class Post(NamedTuple):
    """One entry of the ring.

    A post has two numbers. Ranks compare its number in its family and team, which is the same on
    all of them. This process asks whether its track has passed its number there, since families and
    teams share tracks.

    Attributes:
        place: its number among all posts of this process.
        sequence: its number in its family and team, from 1.
        turn: its number on its track, from 1.
        subject: the description of the post.
        has_passed: returns whether its track is done with the post of a number and all before it.
        posted_at: seconds, on the watch's clock.
    """

    place: int
    sequence: int
    turn: int
    subject: PostInfo
    has_passed: Callable[[int], bool]
    posted_at: float

    def is_done(self) -> bool:
        return self.has_passed(self.turn)

    def text(self) -> str:
        """Return the post as reports name it."""
        subject = self.subject
        return f"{subject.kind} #{self.sequence} ({subject.where})"


class Ring:
    """The last posts of this process; writing one costs 0.2 us.

    Args:
        size: the number of entries, a power of two; more than the launch queue of a GPU (1,024).
        clock: returns seconds.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        assert size & (size - 1) == 0
        self._entries: list[tuple[Any, ...] | None] = [None] * size
        self._clock = clock
        self._next = count().__next__
        self._tallies: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self._turns: dict[Callable[[int], bool], list[int]] = {}

    def writer(self, subject: PostInfo, has_passed: Callable[[int], bool]) -> Callable[[], int]:
        """Return a function that notes a post of `subject` and returns its number on its track."""
        entries, mask, following, clock = (
            self._entries,
            len(self._entries) - 1,
            self._next,
            self._clock,
        )
        tally = self._tallies.setdefault((subject.family, subject.team), [0])
        turns = self._turns.setdefault(has_passed, [0])

        def write() -> int:
            number = tally[0] = tally[0] + 1
            turn = turns[0] = turns[0] + 1
            place = following()
            entries[place & mask] = (place, number, turn, subject, has_passed, clock())
            return turn

        return write

    def forget(self, name: str) -> None:
        """Drop the counts of a program that is gone; families of its own have its name."""
        for key in [key for key in list(self._tallies) if name in key[0]]:
            self._tallies.pop(key, None)

    def posts(self, after: int = -1) -> list[Post]:
        """Return the last posts whose place is above `after`, oldest first."""
        entries = list(self._entries)
        return sorted(Post(*e) for e in entries if e is not None and e[0] > after)

    def tallies(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Return the number of posts by family and team."""
        return {key: tally[0] for key, tally in list(self._tallies.items())}
