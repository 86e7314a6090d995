"""Deadlines shared by several waits, so that their durations do not add up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from math import inf


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time.

    Attributes:
        at: seconds, by the monotonic clock; infinite: there is no deadline.
    """

    at: float = inf

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self, most: float = inf) -> float:
        """Return the seconds until the deadline, at most `most`; 0 once it has passed."""
        return max(0.0, min(most, self.at - time.monotonic()))

    def left_for_store(self) -> timedelta:
        """Return the time left as a timeout for torch's stores: never 0, which means no timeout."""
        return timedelta(seconds=max(self.left(1e6), 0.001))


#: No deadline.
NEVER = Deadline()
