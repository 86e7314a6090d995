"""Capture CUDA graphs, and give them up when that breaks no capture."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mdfuse.interpreter.garbage import no_collection


class Recording(Protocol):
    """Work that was recorded, and can be queued again.

    Attributes:
        replay: queues the work again, on the current stream.
    """

    @property
    def replay(self) -> Callable[[], None]: ...

    def reset(self) -> None:
        """Release the memory of the recording, which is never replayed again."""


class GraphRecorder(Protocol):
    """Records the work that a function queues on the device, without running it there.

    Attributes:
        stream: the stream that is current while the function is called.
    """

    stream: Any

    def record(self, run: Callable[[], list[Any]], place: int) -> tuple[list[Any], Recording]:
        """Call a function; return results, whose buffers each replay fills, and the recording.

        Args:
            run: the function.
            place: when a run replays the recording, among the others of the recorder.
        """


#: A lock for captures and for the destruction of graphs: destroying a graph waits for the device,
#: which no thread may do while another one captures.
_captures = threading.RLock()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep all threads from giving up a graph while the caller captures.

    Graphs that are garbage are collected before that: the collector may run at any line, and
    destroying a graph breaks a capture in the same thread.
    """
    with _captures:
        gc.collect()
        with no_collection():
            yield


def give_up(recording: Recording) -> None:
    """Reset a graph, as soon as no thread captures."""
    with _captures:
        recording.reset()


@dataclass(slots=True)
class ScratchPool:
    """Memory that graphs share; the allocator gives it up with the last of them.

    Attributes:
        handle: names it to the allocator.
        living: how many graphs use it.
        latest: the place in a run of the last one that was captured.
    """

    handle: Any
    living: int = 0
    latest: int = 0


@dataclass(slots=True)
class ScratchPools:
    """Chooses the pool that a capture takes its memory from.

    Results are held as long as their graph, so no later capture of the same pool writes there. An
    earlier one may: its scratch was free when the results were placed. So graphs share a pool only
    if they are captured in the order in which a run replays them.

    Attributes:
        new: makes the handle of a pool.
    """

    new: Callable[[], Any]
    _last: ScratchPool | None = None

    def at(self, place: int) -> ScratchPool:
        """Return the pool for a capture whose graph is replayed at this place of a run."""
        if self._last is None or not self._last.living or place < self._last.latest:
            self._last = ScratchPool(self.new())
        self._last.latest = place
        return self._last


@dataclass(slots=True)
class _CudaRecording:
    """A CUDA graph; its memory goes back to the allocator only when no replay is under way."""

    graph: torch.cuda.CUDAGraph
    device: torch.device
    pool: ScratchPool
    replay: Callable[[], None] = field(init=False)  # each run calls it: the binding itself

    def __post_init__(self) -> None:
        self.replay = super(torch.cuda.CUDAGraph, self.graph).replay

    def reset(self) -> None:
        torch.cuda.synchronize(self.device)
        self.graph.reset()
        self.pool.living -= 1


@dataclass(slots=True)
class CudaRecorder:
    """Records CUDA graphs on a stream that plans are built for.

    Graphs share pools of scratch memory, because they are replayed one after the other.
    """

    device: torch.device
    stream: torch.cuda.Stream
    pools: ScratchPools = field(default_factory=lambda: ScratchPools(torch.cuda.graph_pool_handle))

    def record(self, run: Callable[[], list[Any]], place: int) -> tuple[list[Any], Recording]:
        """Capture the work that a function queues, and return its results and the graph.

        Other threads may use CUDA meanwhile: the libraries' watchdogs query events.
        """
        pool = self.pools.at(place)
        self._make_room()
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                results = run()
            except BaseException:
                torch.cuda.set_stream(self.stream)
                with suppress(RuntimeError):  # ending a broken capture is an error again
                    graph.capture_end()
                raise
            torch.cuda.set_stream(self.stream)
            graph.capture_end()
        pool.living += 1
        return results, _CudaRecording(graph, self.device, pool)

    def _make_room(self) -> None:
        """Give memory that runs left in torch's cache back, where less than it is free.

        A capture allocates all of its memory from the device, and cannot empty the cache.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if cached > free:
            torch.cuda.empty_cache()
