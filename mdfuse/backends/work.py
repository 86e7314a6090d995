"""Communications in flight, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import OutOfMemoryError, Tensor

from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call


class _Done:
    """The work of a communication that has nothing left to do."""

    __slots__ = ()

    waits_again = True

    def wait(self) -> None:
        return None


DONE = _Done()


class _Waitable(Protocol):
    def wait(self) -> Any: ...


class Queued:
    """The work queued so far on the stream that is current where this is made."""

    __slots__ = ("_event",)

    waits_again = True
    is_done = True

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        """Let the stream that is current now wait for it."""
        self._event.wait()


def queued(buffers: Sequence[Tensor]) -> tuple[Queued, ...]:
    """Return the work just queued on buffers; () on CPUs, where it is done."""
    return (Queued(),) if any(x.is_cuda for x in buffers) else ()


def leave(buffers: Iterable[Tensor]) -> None:
    """Let the allocator reuse memory only behind the work queued on the current stream now.

    Buffers of a post are made on its stream, which may never wait for work of other streams on
    them.
    """
    for x in buffers:
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


class Shared:
    """A work that is waited for on several streams.

    Later waits follow the first one through an event on the stream that was current then: most
    works do nothing in a second wait.
    """

    __slots__ = ("_first", "_work")

    waits_again = True

    def __init__(self, work: _Waitable) -> None:
        self._work = work
        self._first: Queued | None = None

    def wait(self) -> None:
        """Let the stream that is current now wait for the work."""
        if self._first is not None:
            self._first.wait()
            return
        self._work.wait()
        self._first = Queued()


@dataclass(slots=True, eq=False)
class Posted:
    """Works in flight, with their buffers and the local work that follows them.

    Attributes:
        call: the communication.
        works: the library's handles, waited for in order.
        referenced: objects that must live until all works are done.
        finish: called once, when all works are done.
    """

    waits_again: ClassVar[bool] = True

    call: Call
    works: Sequence[_Waitable]
    referenced: object
    finish: Callable[[], object] | None = None
    _first: Queued | None = None

    def wait(self) -> None:
        """Return once the buffers may be used (on GPUs: by work queued on the current stream).

        A second wait does not ask the library: it waits for the work that the first one queued.

        Raises:
            BackendError: the communication failed or timed out; a second wait raises again.
        """
        if self._first is not None:
            self._first.wait()
            return
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise failure(self.call, error) from error
        self.works = ()
        if self.finish is not None:
            self.finish()
            self.finish = None
        self.referenced = None
        if torch.cuda.is_initialized():
            self._first = Queued()


def failure(call: Call, error: Exception) -> BackendError:
    return BackendError(
        f"{call.kind} failed on rank {call.rank}",
        where=f"team {call.team}" + ("" if call.root is None else f", root {call.root}"),
        because=first_line(error),
        hint="see what the other members did: each must post the same communications, of the same "
        "sizes, in the same order; raise timeout_s where they are only slow",
    )


def explained(call: Call, error: Exception) -> Exception:
    """Return a library's error as a failure of the call; others, out of memory too, unchanged."""
    if isinstance(error, RuntimeError | ValueError) and not isinstance(error, OutOfMemoryError):
        return failure(call, error)
    return error


def first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
