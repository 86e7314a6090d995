"""Memory of the host that several processes share, and the processes that share it.

The memory is a file without a name (`memfd_create`), which the others open through `/proc`. So
nothing is left behind however its processes end, and `/dev/shm` may be as small as a container's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from dataclasses import asdict, dataclass

from mdfuse.interpreter.processes import Process


def why_not() -> tuple[str, str] | None:
    """Return why processes cannot share memory here, and a remedy; None where they can."""
    if sys.platform != "linux":
        return f"it shares memory as Linux does, and this is {sys.platform}", "use backend='gloo'"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A rank's outbox as the others open it; the card goes through the store.

    Attributes:
        process: of the rank.
        file: the number of its open file.
        device: the handle of its memory on a GPU, in hex; "" where there is none.
        heap: the number of the open file of its process's heap, and its size; 0 where it has none.
        gpu: the name of its GPU, where kernels of it add; else "".
    """

    process: Process
    file: int
    device: str = ""
    heap: tuple[int, int] = (0, 0)
    gpu: str = ""

    def fields(self) -> dict[str, object]:
        """Return the card as a value that JSON can hold."""
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, object]) -> Card:
        process = Process(**fields["process"])  # type: ignore[arg-type]
        heap: tuple[int, int] = tuple(fields["heap"])  # type: ignore[arg-type, assignment]
        return cls(
            process=process,
            file=int(str(fields["file"])),
            device=str(fields["device"]),
            heap=heap,
            gpu=str(fields["gpu"]),
        )


class SharedMemory:
    """A run of bytes that several processes see.

    Args:
        size: of the memory, bytes; it is 0 at first, and takes no room before it is written.
        file: an open file of such memory; None makes a new one.
    """

    def __init__(self, size: int, file: int | None = None) -> None:
        self.size = size
        self.file = os.memfd_create("mdfuse") if file is None else file
        if file is None:
            os.ftruncate(self.file, size)
        self.memory = mmap.mmap(self.file, size)
        #: its first address in this process
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @classmethod
    def of(cls, card: Card, size: int) -> SharedMemory:
        """Open the memory of another process.

        Raises:
            OSError: the process has ended, or does not let this one see its files.
        """
        file = os.open(f"/proc/{card.process.pid}/fd/{card.file}", os.O_RDWR | os.O_CLOEXEC)
        return cls(size, file)

    def words(self, count: int) -> ctypes.Array[ctypes.c_uint32]:
        """Return the first words of 32 bits, each read and written at once."""
        return (ctypes.c_uint32 * count).from_buffer(self.memory)

    def places(self, words: int) -> ctypes.Array[ctypes.c_uint64]:
        """Return the place that belongs to each of so many words, behind them."""
        start = ctypes.sizeof(ctypes.c_uint32) * words
        return (ctypes.c_uint64 * words).from_buffer(self.memory, -(-start // 8) * 8)

    def close(self) -> None:
        """Close the file; the memory goes when nothing refers to it any more."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class Fence:
    """A memory barrier: orders reads and writes of this thread before and after a call of it.

    x86 keeps such an order by itself; other processors do where a lock is given up and taken again,
    since an acquisition is not moved before a release, nor anything out from between the two sides.
    One thread calls it at a time.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()
