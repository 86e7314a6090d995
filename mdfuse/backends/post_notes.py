"""The notes that a backend outside torch.distributed makes of its posts, for the watch.

`runtime/watch/watch.py` keeps these notes and sees when a post does not finish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Track(Protocol):
    """A queue of posts that the device does in order, of any families and teams.

    A track numbers its own posts, from 1.
    """

    def mark(self, number: int) -> Any:
        """Queue a mark on the device: once reached, all posts up to `number` are done."""

    def is_done(self, number: int) -> bool:
        """Return whether the mark of `number` was reached; any thread may ask at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostInfo:
    """A description of a post, which all posts of one instruction share.

    Attributes:
        kind: the kind of communication.
        team: the ranks that take part.
        bytes: the size of what this rank sends or receives, whichever is larger.
        where: the line of the user's program.
        family: posts of one family and team are numbered together, from 1.
        is_shared: whether every member makes every post of the family. Then the numbers agree on
            all ranks, and show which rank is behind.
    """

    kind: str
    team: tuple[int, ...]
    bytes: int
    where: str
    family: str = "collectives"
    is_shared: bool = True


class PostLog(Protocol):
    """The keeper of notes on posts."""

    def prepare(
        self, subject: PostInfo, track: Track
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return a function to call before each post of `subject`, and one to call after it."""

    def on_error(self, team: tuple[int, ...], ask: Callable[[], str | None]) -> None:
        """Register a function to be asked now and then for an error of a team's communicator.

        Args:
            team: the ranks of the communicator.
            ask: returns the error as text, or None.
        """

    def forget(self, *functions: Callable[..., object]) -> None:
        """Unregister functions that were given to `on_error`."""
