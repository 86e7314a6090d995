"""Times of kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mdfuse.torch_private import keep_busy

#: How often a kernel is timed, at first and in all, unless that takes longer than so many ms.
_FIRST, _TIMES, _MOST_MS = 3, 40, 25.0

#: Cycles of a GPU in which the host queues a kernel, what clears the cache, and two events.
_QUEUED_CYCLES = 250_000


def milliseconds(launch: Callable[[], object], cache_bytes: int) -> float:
    """Return the least time of a kernel on the current GPU, whose cache holds none of its operands.

    The GPU waits until the host has queued all launches. A host that compiles beside takes longer
    for a launch than a small kernel runs, and each form would seem to take as long as the host.

    Args:
        launch: starts the kernel.
        cache_bytes: size of the GPU's cache.
    """
    launch()  # it fails here where the GPU cannot run it
    cache = torch.empty(cache_bytes, dtype=torch.int8, device="cuda")

    def least(times: int) -> float:
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in ("begin", "end")] for _ in range(times)
        ]
        torch.cuda.synchronize()
        keep_busy(times * _QUEUED_CYCLES)
        for begin, end in events:
            cache.zero_()
            begin.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        return min(float(begin.elapsed_time(end)) for begin, end in events)

    first = least(_FIRST)
    return first if first * _TIMES > _MOST_MS else min(first, least(_TIMES))
