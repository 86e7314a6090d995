"""A deadline that several waits share, so that they do not add up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from math import inf


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time.

    Attributes:
        at: by the monotonic clock; infinite: there is no deadline.
    """

    at: float = inf

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self, most: float = inf) -> float:
        """Seconds until then, `most` at most; 0 afterwards."""
        return max(0.0, min(most, self.at - time.monotonic()))

    def left_for_store(self) -> timedelta:
        """The same for a store of torch, which takes a timeout of 0 for none."""
        return timedelta(seconds=max(self.left(1e6), 0.001))


#: No deadline.
NEVER = Deadline()
