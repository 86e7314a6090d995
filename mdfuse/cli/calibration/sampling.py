"""Samples of what is timed: how many, by which clock, and which one counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mdfuse.cli.calibration.pace import Clock, Pace
from mdfuse.cli.execution import timed
from mdfuse.runtime.communicator import Communicator

#: Timed samples of each subject: at most, and where the two least of them are close on all ranks,
#: or the three least where the median counts, how far apart as a share.
SAMPLES, _FEW, _CLOSE, _CLOSE_PACED = 5, 3, 0.01, 0.05

#: How often a sample is taken once more that was taken far from the usual speed.
_AGAIN = 2

#: Runs in a row of which the time of one is known: so are those of the programs to be predicted.
QUEUED = 8


Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Watch:
    """How something is timed on a processor.

    Attributes:
        clock: tells seconds.
        pace: at whose usual speed they are given; None: as they are.
    """

    clock: Clock = time.perf_counter
    pace: Pace | None = None


#: By the clock on the wall, as it is.
WALL = Watch()


def seconds_of(comm: Communicator, call: Call, runs: int = 2, watch: Watch = WALL) -> float:
    """Return the seconds of a call, on this rank; all ranks call it.

    At the usual speed of a processor the median of some samples counts. Of others the least, since
    what else runs on a machine only ever adds time. On a GPU its own time counts.
    """
    is_paced = watch.pace is not None
    found = list[float]()
    for sample in samples_of(comm, call, runs, watch):
        found.append(sample)
        if len(found) >= _FEW and _are_close(comm, found, is_paced):
            break
    return statistics.median(found) if is_paced else min(found)


def _are_close(comm: Communicator, samples: Sequence[float], is_paced: bool) -> bool:
    """Tell whether another sample would change little, on any rank; all ranks call it."""
    least, next_one, *rest = sorted(samples)
    off, allowed = (rest[0] - least, _CLOSE_PACED) if is_paced else (next_one - least, _CLOSE)
    is_close = off <= allowed * least
    return not any(comm.all_ok(None if is_close else "its samples are far apart"))


def samples_of(comm: Communicator, call: Call, runs: int, watch: Watch = WALL) -> Iterator[float]:
    """Yield the seconds of a call, on this rank, in each of some samples; all ranks call it."""

    def calls() -> None:
        for _ in range(runs):
            call()

    for _ in range(3):  # prepares, captures, connects
        call()
    is_gpu = comm.device.type == "cuda"
    again = _AGAIN if comm.size == 1 else 0  # ranks would have to agree

    def once() -> float:
        return (_queued(calls, call, comm) if is_gpu else timed(calls, comm, watch.clock)) / runs

    for _ in range(SAMPLES):
        yield watch.pace.timed(once, again)[1] if watch.pace is not None else once()


#: Bytes that a GPU copies before what is timed, and how often: some 2 ms, in which the host queues
#: all of it.
_HELD_BYTES, _HELD = 1 << 28, 8


def _queued(calls: Callable[[], object], first: Callable[[], object], comm: Communicator) -> float:
    """Return the seconds between two events on a GPU that has all of some calls before it.

    Ranks that communicate in a first one begin to count at the same time.
    """
    source = torch.empty(_HELD_BYTES, dtype=torch.uint8, device=comm.device)
    copy = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(comm.device)
    comm.barrier()
    for _ in range(_HELD):
        copy.copy_(source)
    first()
    start.record()
    calls()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
