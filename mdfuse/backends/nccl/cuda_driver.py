"""The few calls of NVIDIA's driver that a post needs besides the communication itself.

Through ctypes, for three reasons: it costs no more than the other ways (0.3 us a call on top of the
driver, measured with handles made beforehand), it needs no package of the right version, and it
lets go of the interpreter's lock meanwhile. The last one matters: behind a communication that hangs
the launch queue fills up, the next call blocks, and the watchdog must be able to run and say so.
(`torch.cuda.Event.record` keeps the lock.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from mdfuse.backends.post_notes import Track
from mdfuse.errors import BackendError
from mdfuse.torch_private import current_raw_stream

#: An event without timing costs less to record (cuda.h, CU_EVENT_DISABLE_TIMING).
_DISABLE_TIMING = 2

#: Words in a block of page-locked memory; a word serves one team on one stream.
_WORDS = 1024

#: Sequence numbers are compared in 32 bits; they wrap.
_BITS = 0xFFFFFFFF

#: The result of a call in a thread to which no GPU belongs yet: CUDA_ERROR_INVALID_CONTEXT.
_NO_CONTEXT = 201


class _Event(ctypes.c_void_p):
    """An event's handle, whose deletion destroys the event.

    Graphs that were captured with the event do not need it any more, and the driver keeps it as
    long as queued work refers to it.
    """

    destroy: Callable[[Any], Any] | None = None

    def __del__(self) -> None:
        if self.destroy is not None and self.value:
            self.destroy(self)


class MarkedTrack:
    """A track whose marks are 32-bit writes of the device into page-locked memory of the host.

    The alternative is an event behind each post. A write costs as much to queue, but is read from
    memory. A query of an event is a call of CUDA from the watchdog's thread, which breaks a capture
    that is under way elsewhere in the process, and waits for locks that a blocked launch may hold.
    """

    __slots__ = ("_address", "_stream", "_word", "_write")

    def __init__(self, write: Callable[..., Any], stream: Any, address: int) -> None:
        self._write = write
        self._stream = stream
        self._address = ctypes.c_uint64(address)
        self._word = ctypes.c_uint32.from_address(address)

    def mark(self, number: int) -> None:
        self._write(self._stream, self._address, number & _BITS, 0)

    def is_done(self, number: int) -> bool:
        return (self._word.value - number) & _BITS < 1 << 31


class CudaDevice:
    """One GPU, driven through libcuda, which tests replace."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        library = library or ctypes.CDLL("libcuda.so.1")
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._device = device
        #: event, stream: the event happens once all work queued on the stream is done
        self.record: Callable[[Any, Any], Any] = driver_function(
            library.cuEventRecord, pointer, pointer
        )
        #: stream, event, 0: later work on the stream waits for the event
        self.wait: Callable[[Any, Any, int], Any] = driver_function(
            library.cuStreamWaitEvent, pointer, pointer, number
        )
        self._write = driver_function(
            library.cuStreamWriteValue32_v2, pointer, ctypes.c_uint64, ctypes.c_uint32, number
        )
        self._create = driver_function(library.cuEventCreate, ctypes.POINTER(_Event), number)
        _Event.destroy = library.cuEventDestroy_v2
        self._blocks: list[torch.Tensor] = []
        self._used = _WORDS
        self._streams: list[torch.cuda.Stream] = []

    def stream(self, handle: int) -> Any:
        """Return a stream in the form that `record` and `wait` take."""
        return ctypes.c_void_p(handle)

    def event(self) -> Any:
        """Return a new event; it lives as long as its object."""
        event = _Event()
        self._create(ctypes.byref(event), _DISABLE_TIMING)
        return event

    def track(self, handle: int) -> Track:
        """Return a new track on a stream, with a word of page-locked memory for its marks.

        Such memory has the same address on the host and on the device.
        """
        if self._used == _WORDS:
            self._blocks.append(torch.zeros(_WORDS, dtype=torch.int32, pin_memory=True))
            self._used = 0
        address = self._blocks[-1].data_ptr() + 4 * self._used
        self._used += 1
        return MarkedTrack(self._write, self.stream(handle), address)

    def new_stream(self) -> int:
        """Make a stream to communicate on, and return its handle."""
        self._streams.append(torch.cuda.Stream(self._device))
        return int(self._streams[-1].cuda_stream)

    def current_stream(self) -> int:
        """Return the handle of the current stream."""
        return current_raw_stream(self._device.index)

    def enter(self) -> None:
        """Make the device current in this thread."""
        torch.cuda.set_device(self._device)

    def synchronize(self) -> None:
        """Return once everything queued on the device is done."""
        torch.cuda.synchronize(self._device)

    def settle(self) -> None:
        """Do the same in a thread that may not have used the device yet."""
        self.enter()
        self.synchronize()


def driver_function(function: Any, *arguments: Any) -> Any:
    """Return a function of the driver, made to raise BackendError where it fails.

    The check adds 0.1 us to a call. Torch's own threads, such as those of its backward, name GPU 0
    without a call of CUDA, so that the driver does not know it there: then it is told.
    """
    name = getattr(function, "__name__", "a call")
    function.argtypes = arguments
    function.restype = ctypes.c_int

    def check(result: int, _: Any, given: tuple[Any, ...]) -> int:
        if result == _NO_CONTEXT and enter_device():
            return int(function(*given))
        if result:
            raise BackendError(
                f"the CUDA driver refuses {name}: error {result}",
                because="the numbers are listed under CUresult in the manual of the driver",
                hint="an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1",
            )
        return result

    function.errcheck = check
    return function


def enter_device(library: Any = None) -> bool:
    """Let torch's current device be the driver's in this thread; return whether none was before."""
    library = library or ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    if library.cuCtxGetCurrent(ctypes.byref(context)) or context.value:
        return False
    index = torch.cuda.current_device()
    # Torch holds the device's context to the end of the process, and so may this thread.
    return not (
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
        or library.cuCtxSetCurrent(context)
    )
