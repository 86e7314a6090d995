"""How fast a processor is just now, by a small product whose operands lie in its core's cache.

The clock of a virtual machine's processor goes up and down by a third within seconds, and where two
processors are one core's two threads, both may be half as fast for a minute. Whatever is timed on
one is timed between two looks at this product, and given at its usual speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

#: Tells seconds.
Clock = Callable[[], float]

#: Rows and columns of the product: its three matrices take 192 KiB.
_SIDE = 128

#: Products of a look, behind one that brings the operands.
_PRODUCTS = 5

#: How far from the usual speed one may be, as a share, for times at the usual one to be told by it:
#: what comes from memory goes up and down less than a product does.
FAR = 0.25


def own_clock() -> Clock:
    """Return the clock of work that waits for nobody: processor time, where a thread does it all.

    What else runs takes none of it.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


@dataclass
class Pace:
    """The speed of this process's processor.

    Attributes:
        usual: seconds of the product at the speed at which times are given; 0: not known yet.
        looks: what it took so far.
    """

    usual: float = 0.0
    looks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._x = torch.full((_SIDE, _SIDE), 1 / _SIDE)
        self._out = torch.empty_like(self._x)

    def look(self) -> float:
        """Return the seconds that the product takes now."""
        clock = own_clock()
        torch.mm(self._x, self._x, out=self._out)
        start = clock()
        for _ in range(_PRODUCTS):
            torch.mm(self._x, self._x, out=self._out)
        self.looks.append((clock() - start) / _PRODUCTS)
        return self.looks[-1]

    def timed(self, seconds: Callable[[], float], again: int = 0) -> tuple[float, float]:
        """Return what something took, and what it takes at the usual speed.

        Args:
            seconds: does it, and tells its seconds.
            again: how often at most it is done once more because the speed was far from the usual.

        >>> pace = Pace(usual=2.0)
        >>> pace.look = iter([3.0, 5.0, 2.0, 2.5]).__next__
        >>> pace.timed(lambda: 10.0), pace.timed(lambda: 9.0)
        ((10.0, 5.0), (9.0, 8.0))
        """
        before = self.look()
        taken = seconds()
        now = (before + self.look()) / 2
        if not self.usual or not now:
            return taken, taken
        if again and abs(now / self.usual - 1) > FAR:
            return self.timed(seconds, again - 1)
        return taken, taken * self.usual / now
