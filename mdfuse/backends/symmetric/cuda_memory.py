"""Memory of a GPU that several processes see, and a stream that waits for words in memory.

Through ctypes, as `mdfuse.backends.nccl.cuda_driver` is. Memory goes from one process to another by
CUDA's IPC handles: also between processes that share one GPU. Words lie in memory of the host that
is registered with the GPU, so that the host sees them, too; signals in memory of the GPU that waits
for them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mdfuse.backends.nccl.cuda_driver import CudaDevice, driver_function

#: cuda.h: CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
#: CU_STREAM_WAIT_VALUE_EQ.
_REGISTERED, _PEER_ACCESS, _EQUAL = 1 | 2, 1, 1

Made = TypeVar("Made")

_pointer, _address = ctypes.c_void_p, ctypes.c_uint64
_size, _number = ctypes.c_size_t, ctypes.c_uint32


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which goes by value."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class CudaMemory:
    """The driver's functions for memory; the calling thread has made the device current.

    Its functions raise BackendError where the driver refuses them.
    """

    def __init__(self, library: Any = None) -> None:
        library = library or ctypes.CDLL("libcuda.so.1")
        by_reference = ctypes.POINTER(_address)
        self._allocate = driver_function(library.cuMemAlloc_v2, by_reference, _size)
        self._handle = driver_function(library.cuIpcGetMemHandle, ctypes.POINTER(_Handle), _address)
        self._clear = driver_function(library.cuMemsetD8_v2, _address, ctypes.c_ubyte, _size)
        self._open = driver_function(library.cuIpcOpenMemHandle_v2, by_reference, _Handle, _number)
        self._register = driver_function(library.cuMemHostRegister_v2, _pointer, _size, _number)
        self._unregister = driver_function(library.cuMemHostUnregister, _pointer)
        self._seen_at = driver_function(
            library.cuMemHostGetDevicePointer_v2, by_reference, _pointer, _number
        )

    def allocate(self, size: int) -> int:
        """Return the address of new memory on the device."""
        address = _address()
        self._allocate(ctypes.byref(address), size)
        return address.value

    def handle(self, address: int) -> str:
        """Return the handle with which another process opens memory of this one."""
        exported = _Handle()
        self._handle(ctypes.byref(exported), address)
        return bytes(exported).hex()

    def clear(self, address: int, size: int) -> None:
        """Queue zeros for memory on the device, on the default stream."""
        self._clear(address, 0, size)

    def open(self, handle: str) -> int:
        """Return the address, in this process, of another's memory."""
        address = _address()
        given = _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._open(ctypes.byref(address), given, _PEER_ACCESS)
        return address.value

    def register(self, address: int, size: int) -> int:
        """Let the device see whole pages of the host's memory; return the address there."""
        seen_at = _address()
        self._register(address, size, _REGISTERED)
        self._seen_at(ctypes.byref(seen_at), address, 0)
        return seen_at.value

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._unregister(address)


#: How many queues of work a process has on a GPU. Streams share them where there are more streams,
#: and one that waits for another rank would hold up those that this rank needs meanwhile.
_QUEUES, _QUEUES_SAID, _FEWEST = "CUDA_DEVICE_MAX_CONNECTIONS", "32", 8

#: cuda.h: CU_STREAM_NON_BLOCKING; the work of a lane is short, and others wait for it.
_NON_BLOCKING, _HIGH = 1, -1


def ask_for_queues() -> None:
    """Ask for as many queues as there can be, unless the user did; before CUDA starts."""
    os.environ.setdefault(_QUEUES, _QUEUES_SAID)


def too_few_queues() -> tuple[str, str] | None:
    """Return why lanes would hold up other streams, and a remedy; None where they do not."""
    said = os.environ.get(_QUEUES, _QUEUES_SAID)
    if not said.isdecimal() or int(said) >= _FEWEST:
        return None
    return (
        f"{_QUEUES}={said}: a stream that waits for another rank would hold up the others",
        f"leave it unset, or set it to {_QUEUES_SAID}",
    )


class CudaLane:
    """The queue of a team's moves on the device: a stream of its own, which makes them in order."""

    def __init__(self, device: CudaDevice, number: int, library: Any = None) -> None:
        library = library or ctypes.CDLL("libcuda.so.1")
        create = driver_function(
            library.cuStreamCreateWithPriority, ctypes.POINTER(_pointer), _number, ctypes.c_int
        )
        stream = _pointer()
        # Torch's own streams are few, and shared.
        create(ctypes.byref(stream), _NON_BLOCKING, _HIGH)
        self.stream = torch.cuda.ExternalStream(stream.value, device=number)
        #: words and the values that its waits are for
        self.awaited: set[tuple[int, int]] = set()
        self._device, self._stream = device, device.stream(self.stream.cuda_stream)
        self._copy = driver_function(library.cuMemcpyAsync, _address, _address, _size, _pointer)
        signature = _pointer, _address, _number, _number
        self._write = driver_function(library.cuStreamWriteValue32_v2, *signature)
        self._wait = driver_function(library.cuStreamWaitValue32_v2, *signature)
        self._fill = driver_function(library.cuMemsetD32Async, _address, _number, _size, _pointer)
        status, era = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(_address)
        self._capture = driver_function(
            library.cuStreamGetCaptureInfo_v2, _pointer, status, era, *[_pointer] * 3
        )

    def begin(self) -> None:
        """Queue later work behind all work queued on the current stream."""
        fork = self._device.event()
        self._device.record(fork, self._device.stream(self._device.current_stream()))
        self._device.wait(self._stream, fork, 0)

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy of bytes between two addresses."""
        self._copy(target, source, size, self._stream)

    def write(self, word: int, value: int) -> None:
        """Queue a write of a word, which becomes visible after earlier copies."""
        self._write(self._stream, word, value, 0)

    def wait(self, word: int, value: int) -> None:
        """Queue a wait until a word has a value."""
        self.awaited.add((word, value))
        self._wait(self._stream, word, value, _EQUAL)

    def fill(self, word: int, value: int, count: int) -> None:
        """Queue a write of one value to many words of the device."""
        self._fill(word, value, count, self._stream)

    def make(self, work: Callable[[], Made]) -> Made:
        """Return the result of a function, in memory that belongs to the lane."""
        with torch.cuda.stream(self.stream):
            return work()

    def do(self, work: Callable[[], object]) -> None:
        """Queue torch's work of a function."""
        self.make(work)

    def end(self) -> Callable[[], None]:
        """Return a function that lets the then current stream wait for all work queued so far."""
        device, done = self._device, self._device.event()
        device.record(done, self._stream)
        return lambda: device.wait(device.stream(device.current_stream()), done, 0)

    def era(self) -> int:
        """Return the number of the capture that the lane takes part in; 0: none."""
        status, era = ctypes.c_int(), _address()
        references = ctypes.byref(status), ctypes.byref(era)
        self._capture(self._stream, *references, None, None, None)
        return era.value if status.value else 0
