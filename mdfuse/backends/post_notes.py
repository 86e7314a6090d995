"""What a backend outside torch.distributed tells the watch about its posts.

`runtime/watch/watch.py` keeps these notes and sees when a post does not finish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Track(Protocol):
    """A queue of posts that are done in order, whatever they are.

    Its posts are numbered by themselves, from 1, so that any families and teams may share it.
    """

    def mark(self, number: int) -> Any:
        """Queue the news that everything up to `number` is done."""

    def is_done(self, number: int) -> bool:
        """Whether that news has come; asked from another thread, at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostInfo:
    """What is posted; all posts of one instruction share it.

    Attributes:
        kind: the kind of communication.
        team: the ranks that take part.
        bytes: how many, of this rank's larger side.
        where: the line of the user's program.
        family: posts of one family and team are numbered together, from 1.
        is_shared: whether every member posts each one of the family. Then the numbers agree on all
            ranks, and tell who is behind.
    """

    kind: str
    team: tuple[int, ...]
    bytes: int
    where: str
    family: str = "collectives"
    is_shared: bool = True


class PostLog(Protocol):
    """Who keeps the notes."""

    def prepare(
        self, subject: PostInfo, track: Track
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """What to call before and behind each post of `subject`."""

    def on_error(self, team: tuple[int, ...], ask: Callable[[], str | None]) -> None:
        """Ask for errors of a team's communicator now and then; a text is one."""

    def forget(self, *functions: Callable[..., object]) -> None:
        """Take back what was given to `on_error`."""
