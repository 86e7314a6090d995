"""Processes that live: their watchdogs tell their positions again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from mdfuse.runtime.watch.positions import Position

K = TypeVar("K", bound=Hashable)


@dataclass(eq=False)
class Pulse(Generic[K]):
    """Tells which processes live; one that nobody has listened to for long yet does.

    Attributes:
        heard_of: returns the last position of a process; None: it left, or is unknown.
        patience_s: for how long a process that lives may tell nothing.
        longest_s: how long those that live, but do not come, are waited for.
    """

    heard_of: Callable[[K], Position | None]
    patience_s: float
    longest_s: float = inf
    #: process -> its last position, when it was new, and when it was last asked for
    _known: dict[K, tuple[Position | None, float, float]] = field(default_factory=dict)

    def is_alive(self, process: K) -> bool:
        """Return whether a process has told a new position in the last `patience_s`."""
        now = time.monotonic()
        heard, since, asked_at = self._known.get(process, (None, now, -inf))
        if now - asked_at > self.patience_s / 8:
            new, asked_at = self.heard_of(process), now
            is_new = (new and new.beat) != (heard and heard.beat)
            # this process, or the store, may have been stopped since it asked
            heard, since = new, time.monotonic() if is_new else since
            self._known[process] = heard, since, asked_at
        return heard is not None and asked_at - since < self.patience_s

    def at(self, process: K) -> str:
        """Return the position of a process that lives, in words."""
        heard = self._known[process][0]
        return "" if heard is None else heard.doing or heard.host or "no line of Python"
