"""Trials: the first runs of a program take two forms in turn; all ranks keep the quicker one."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mdfuse.evaluator import HostIrEvaluator
from mdfuse.runtime.communicator import init

#: How often each form runs, and how many of its first runs do not count: they make plans, compile
#: kernels and capture graphs.
_RUNS, _FIRST = 6, 3


@dataclass
class Trial:
    """The runs of a program in two forms, which give the same values, in turn.

    All ranks run a program equally often, so that all meet after the last run of the trial; the
    time of a form is that of the slowest rank, the median of its runs there.

    Args:
        plain: runs it one after the other.
        overlapped: runs it in chunks, or with posts ahead of their place.
        keep: called when it is decided.

    Attributes:
        best: the faster form, once it is decided; one after the other until then.
        seconds: of both, once it is decided.
    """

    plain: HostIrEvaluator
    overlapped: HostIrEvaluator
    keep: Callable[[Trial], None]
    best: HostIrEvaluator = field(init=False)
    seconds: tuple[float, float] | None = None
    _times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    _runs: int = 0

    def __post_init__(self) -> None:
        self.best = self.plain

    @property
    def decision(self) -> str:
        """The decision, in a line."""
        assert self.seconds is not None
        plain, chunks = (f"{s * 1e3:.3g} ms" for s in self.seconds)
        form = "overlapped" if self.best is self.overlapped else "one after the other"
        return (
            f"measured: {chunks} overlapped, {plain} one after the other; all ranks run it {form}"
        )

    def call(self, arguments: Sequence[Any], out: Sequence[Any] | None = None) -> list[Any]:
        """Run once, in the form whose turn it is; see `HostIrEvaluator.call`."""
        turn, self._runs = self._runs % 2, self._runs + 1
        evaluator = (self.plain, self.overlapped)[turn]
        begin = _now()
        results = evaluator.call(arguments, out)
        self._times[turn].append(_now() - begin)
        if self._runs >= 2 * _RUNS:  # more where the last one failed
            self._decide()
        return results

    def _decide(self) -> None:
        """Agree with all ranks on the quicker form; they all read the same times.

        A form whose runs failed is not chosen; the plans of the slower one are dropped, with their
        buffers.
        """
        mine = [statistics.median(times[_FIRST:] or [math.inf]) for times in self._times]
        said = init(self.plain.options).all_ok(json.dumps(mine))
        plain, chunks = (
            max(times) for times in zip(*(json.loads(t or "null") for t in said), strict=True)
        )
        self.seconds = plain, chunks
        self.best = self.overlapped if chunks < plain else self.plain
        (self.plain if self.best is self.overlapped else self.overlapped).forget()
        self.keep(self)


def _now() -> float:
    """Return the time, in seconds, once the GPU has finished its queued work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
