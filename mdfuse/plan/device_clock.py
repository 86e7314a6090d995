"""The times of work on a GPU: a pair of CUDA events around each step of a traced plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch


@dataclass
class DeviceClock:
    """Notes when a device began and ended each step, on whichever stream is current there.

    A run begins when the device is idle, so that its clock is that of the host from there on, and
    ends when all is done; so runs do not overlap as they do untraced.

    Args:
        device: a CUDA device.
        numbers: of the entries of a trace that are timed.
    """

    device: torch.device
    numbers: Iterable[int]
    base: torch.cuda.Event = field(init=False)
    pairs: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = field(init=False)

    def __post_init__(self) -> None:
        self.base = _event()
        self.pairs = {n: (_event(), _event()) for n in self.numbers}

    def begin(self) -> None:
        """Wait until the device is idle, and note the time there."""
        torch.cuda.synchronize(self.device)
        self.base.record()

    def before(self, number: int) -> Callable[[], object]:
        """Return the function to call in front of a step."""
        return self.pairs[number][0].record

    def behind(self, number: int, note: Callable[[], object]) -> Callable[[], object]:
        """Return the function to call behind a step, where `note` was called before."""
        record = self.pairs[number][1].record

        def stamp() -> None:
            record()
            note()

        return stamp

    def times(self) -> list[tuple[int, int, int]]:
        """Wait until all is done; return (number, start, stop) of each step, ns from the begin."""
        torch.cuda.synchronize(self.device)
        return [
            (n, self._since(start), self._since(stop)) for n, (start, stop) in self.pairs.items()
        ]

    def _since(self, event: torch.cuda.Event) -> int:
        ms: float = self.base.elapsed_time(event)
        return round(ms * 1e6)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
