"""Samples of timed calls: their number, their clock, and the one that counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from mdfuse.cli.launched_runs import timed
from mdfuse.runtime.communicator import Communicator

#: Timed samples of each subject: at most, and where the two least of them are close on all ranks,
#: how far apart as a share.
SAMPLES, _FEW, _CLOSE = 5, 3, 0.01

#: Runs in a row of which the time of one is known: so are those of the programs to be predicted.
QUEUED = 8

#: Runs the timed work once.
Call = Callable[[], object]

#: Returns a time in seconds.
Clock = Callable[[], float]

#: The clock on the wall.
WALL: Clock = time.perf_counter


def own_clock() -> Clock:
    """Return the clock of work that waits for nobody: processor time, where a thread does it all.

    Other processes take none of it.
    """
    return time.thread_time if torch.get_num_threads() == 1 else WALL


def seconds_of(comm: Communicator, call: Call, runs: int = 2, clock: Clock = WALL) -> float:
    """Return the seconds of a call, on this rank; all ranks call it.

    Some samples are taken, and the least counts, since other processes on a machine only ever add
    time. On a GPU its own time counts.
    """
    samples = list[float]()
    for sample in samples_of(comm, call, runs, clock):
        samples.append(sample)
        if len(samples) >= _FEW and _are_close(comm, samples):
            break
    return min(samples)


def _are_close(comm: Communicator, samples: Sequence[float]) -> bool:
    """Return whether another sample would change little, on any rank; all ranks call it."""
    least, next_one, *_ = sorted(samples)
    is_close = next_one - least <= _CLOSE * least
    return not any(comm.all_ok(None if is_close else "its samples are far apart"))


def samples_of(comm: Communicator, call: Call, runs: int, clock: Clock = WALL) -> Iterator[float]:
    """Yield the seconds of a call, on this rank, in each of some samples; all ranks call it."""

    def calls() -> None:
        for _ in range(runs):
            call()

    for _ in range(3):  # prepares, captures, connects
        call()
    is_gpu = comm.device.type == "cuda"
    for _ in range(SAMPLES):
        yield (_queued(calls, call, comm) if is_gpu else timed(calls, comm, clock)) / runs


#: Bytes that a GPU copies before the timed work, and how often: some 2 ms, in which the host queues
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
