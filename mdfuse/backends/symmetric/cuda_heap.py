"""A process's pool on its GPU: memory that others open by CUDA's IPC, and streams.

An *arena* is a run of memory for values that a program computes and sends: the others copy them
directly from it. Ranks may share a GPU, or each have one that reaches the others'. A run that was
given back is reused, and never freed while the process lives: others may still have it open.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.symmetric.cuda_memory import CudaLane, CudaMemory
from mdfuse.errors import BackendError

#: Sizes of runs are multiples of this, so that they are alike more often.
_ALIGNED = 2 << 20

#: The streams of a team.
Lanes = tuple[CudaLane, CudaLane, CudaLane, CudaLane]

#: A run is taken again where at least one byte of so many is used.
_WASTE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapRun:
    """Memory of this process.

    Attributes:
        address: of its first byte.
        size: in bytes.
        handle: with which other processes open it.
    """

    address: int
    size: int
    handle: str


class _Bytes:
    """Memory of a GPU as torch takes it from others."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@dataclass(eq=False)
class CudaHeap:
    """The runs of this process on one GPU, and those of other processes that it has open."""

    memory: CudaMemory
    device: torch.device
    _runs: list[HeapRun] = field(default_factory=list)
    _idle: list[HeapRun] = field(default_factory=list)
    _lanes: list[Lanes] = field(default_factory=list)
    _opened: dict[str, int] = field(default_factory=dict)  # handle -> address
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def number(self) -> int:
        """The number of the GPU."""
        return self.device.index

    def take(self, size: int) -> HeapRun:
        """Return unused memory of at least so many bytes.

        Raises:
            BackendError: the GPU has no room.
        """
        size = max(-(-size // _ALIGNED), 1) * _ALIGNED
        with self._lock:
            fits = [x for x in self._idle if size <= x.size <= _WASTE * size]
            if fits:
                idle = min(fits, key=lambda x: x.size)
                self._idle.remove(idle)
                return idle
            address = self._allocated(size)
            run = HeapRun(address=address, size=size, handle=self.memory.handle(address))
            self._runs.append(run)
            return run

    def _allocated(self, size: int) -> int:
        try:
            return self.memory.allocate(size)
        except BackendError:  # torch may cache memory that it does not use
            torch.cuda.empty_cache()
            return self.memory.allocate(size)

    def give(self, run: HeapRun) -> None:
        """Give back memory that has no readers.

        It takes no lock, since garbage collection may call it in a thread that holds the lock.
        """
        self._idle.append(run)

    def arena(self, size: int) -> Tensor:
        """Return memory as a tensor of bytes; it is given back when no view of it is left."""
        run = self.take(size)
        torch.cuda.synchronize(self.device)  # its last user may have queued work on it
        owner = _Bytes(run.address, size)
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.as_tensor(owner, device=self.device)  # which keeps its owner
        weakref.finalize(owner, self.give, run).atexit = False
        return tensor

    def take_lanes(self, device: CudaDevice) -> Lanes:
        """Return streams for a team, those of a closed one first: a GPU has few queues for them."""
        with self._lock:
            if self._lanes:
                return self._lanes.pop()
        one, two, three, four = (CudaLane(device, self.number) for _ in range(4))
        return one, two, three, four

    def give_lanes(self, lanes: Lanes) -> None:
        """Give streams back on which nothing is queued."""
        for lane in lanes:
            lane.awaited.clear()
        self._lanes.append(lanes)

    def open(self, handle: str) -> int:
        """Return the address, in this process, of memory of any process."""
        with self._lock:
            address = next((x.address for x in self._runs if x.handle == handle), None)
            if address is not None:
                return address
            if handle not in self._opened:
                self._opened[handle] = self.memory.open(handle)
            return self._opened[handle]

    def find(self, address: int) -> tuple[str, int] | None:
        """Return the handle of the memory at an address, and the offset of the address in it.

        None where the address is not in this heap.
        """
        for run in self._runs:
            if 0 <= address - run.address < run.size:
                return run.handle, address - run.address
        return None


#: By the number of the GPU.
_heaps: dict[int, CudaHeap] = {}


def heap_of(device: torch.device) -> CudaHeap:
    """Return this process's heap on a GPU, whose context is current."""
    number = device.index if device.index is not None else torch.cuda.current_device()
    if number not in _heaps:
        _heaps[number] = CudaHeap(CudaMemory(), torch.device("cuda", number))
    return _heaps[number]
