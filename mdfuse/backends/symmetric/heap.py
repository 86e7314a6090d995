"""Memory of this process that other ranks of the host can read: buffers out of which they copy.

The memory is one file without a name, as large as the host's memory: pages that were never written
take no room. So an offset in the file locates a buffer for another process.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from collections import defaultdict

import torch
from torch import Tensor

from mdfuse.backends.symmetric.host_memory import SharedMemory

#: Alignment of buffers, bytes.
_ALIGNED = 64


class Heap:
    """Memory for buffers.

    Args:
        size: of the file, bytes; None: that of the host's memory.

    Raises:
        OSError: the process has no room for it among its addresses, or files.
    """

    def __init__(self, size: int | None = None) -> None:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.memory = SharedMemory(pages if size is None else size)
        self._lock, self._end = threading.Lock(), 0
        self._process = os.getpid()
        weakref.finalize(self, self.memory.close)
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # size -> places

    @property
    def is_own(self) -> bool:
        """True in the process that made it, False in a fork of that process."""
        return os.getpid() == self._process

    def empty(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """Return a new dense tensor, whose memory is used again when it is gone.

        None where there is no room left, and in a fork of the process, which would share it.
        """
        count = math.prod(shape)
        place = self._take(count * dtype.itemsize) if count and self.is_own else None
        if place is None:
            return None
        size, start = place
        held = (ctypes.c_char * size).from_buffer(self.memory.memory, start)
        weakref.finalize(held, self._free[size].append, start).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=count).as_strided(shape, strides)

    def place(self, address: int) -> int | None:
        """Return the offset in the file of an address of this process; None if it has none."""
        place = address - self.memory.address
        return place if 0 <= place < self._end else None

    def _take(self, nbytes: int) -> tuple[int, int] | None:
        """Return the size, at most an eighth larger, and the offset of unused memory."""
        step = max(_ALIGNED, 1 << max(nbytes.bit_length() - 4, 0))
        size = -(-nbytes // step) * step
        with self._lock:
            if self._free[size]:
                return size, self._free[size].pop()
            start = -(-self._end // _ALIGNED) * _ALIGNED
            if start + size > self.memory.size:
                return None
            self._end = start + size
            return size, start


class _Opened:
    """The heap of this process, as long as a rank in it, or a buffer, uses it."""

    heap: weakref.ref[Heap] | None = None


def the_heap() -> Heap | None:
    """Return the heap that this process has open."""
    return _Opened.heap() if _Opened.heap is not None else None


def open_heap() -> Heap | None:
    """Return the heap of this process, a new one where there is none; None where there cannot be.

    It is there as long as the caller keeps it.
    """
    heap = the_heap()
    if heap is None or not heap.is_own:
        try:
            heap = Heap()
        except (OSError, ValueError):
            return None
        _Opened.heap = weakref.ref(heap)
    return heap


def symmetric_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a new dense tensor on the CPU, which the others can read where there is a heap."""
    heap = the_heap()
    tensor = heap.empty(shape, strides, dtype) if heap is not None else None
    return torch.empty_strided(shape, strides, dtype=dtype) if tensor is None else tensor
