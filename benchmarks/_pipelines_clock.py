"""The time that all ranks of one host take together."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _ranks import Ranks


def makespan_of(ranks: Ranks, calls: Callable[[], None]) -> float:
    """Nanoseconds from when the first rank begins until the last one is done.

    The clocks of all ranks are that of their host.
    """
    start = time.perf_counter_ns()
    calls()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    mine = torch.tensor([start, time.perf_counter_ns()], device=ranks.device)
    every = [torch.empty_like(mine) for _ in range(ranks.comm.size)]
    dist.all_gather(every, mine)
    starts, ends = torch.stack(every).cpu().unbind(1)
    return float(ends.max() - starts.min())
