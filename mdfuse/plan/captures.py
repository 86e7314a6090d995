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

    def record(self, run: Callable[[], list[Any]]) -> tuple[list[Any], Recording]:
        """Call a function; return results, whose buffers each replay fills, and the recording."""


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
class _CudaRecording:
    """A CUDA graph; its memory goes back to the allocator only when no replay is under way."""

    graph: torch.cuda.CUDAGraph
    recorder: CudaRecorder
    replay: Callable[[], None] = field(init=False)  # each run calls it: the binding itself

    def __post_init__(self) -> None:
        self.replay = super(torch.cuda.CUDAGraph, self.graph).replay

    def reset(self) -> None:
        torch.cuda.synchronize(self.recorder.device)
        self.graph.reset()
        self.recorder.living -= 1


@dataclass(slots=True)
class CudaRecorder:
    """Records CUDA graphs on a stream that plans are built for.

    All graphs share one pool of scratch memory, because they are replayed one after the other.
    Their results are held as long as the graphs, so no other graph writes there.

    Attributes:
        living: how many graphs there are.
        pool: their memory; torch gives it up with the last of them.
    """

    device: torch.device
    stream: torch.cuda.Stream
    living: int = 0
    pool: Any = None

    def record(self, run: Callable[[], list[Any]]) -> tuple[list[Any], Recording]:
        """Capture the work that a function queues, and return its results and the graph.

        Other threads may use CUDA meanwhile: the libraries' watchdogs query events.
        """
        if not self.living:
            self.pool = torch.cuda.graph_pool_handle()
        self._make_room()
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                results = run()
            except BaseException:
                torch.cuda.set_stream(self.stream)
                with suppress(RuntimeError):  # ending a broken capture is an error again
                    graph.capture_end()
                raise
            torch.cuda.set_stream(self.stream)
            graph.capture_end()
        self.living += 1
        return results, _CudaRecording(graph, self)

    def _make_room(self) -> None:
        """Give memory that runs left in torch's cache back, where less than it is free.

        A capture allocates all of its memory from the device, and cannot empty the cache.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if cached > free:
            torch.cuda.empty_cache()
