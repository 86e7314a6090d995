"""Communications in flight, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import OutOfMemoryError

from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call


class _Done:
    """The work of a communication that has nothing left to do."""

    __slots__ = ()

    def wait(self) -> None:
        return None


DONE = _Done()


class _Waitable(Protocol):
    def wait(self) -> Any: ...


@dataclass(slots=True, eq=False)
class Posted:
    """Works in flight, with their buffers and the local work that follows them.

    Attributes:
        call: what was posted.
        works: the library's handles, waited for in order.
        kept: objects that must live until all works are done.
        finish: called once, when all works are done.
    """

    call: Call
    works: Sequence[_Waitable]
    kept: object
    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        """Return once the buffers may be used; a second wait returns at once.

        Raises:
            BackendError: the communication failed or timed out; a second wait raises again.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise failure(self.call, error) from error
        self.works = ()
        if self.finish is not None:
            self.finish()
            self.finish = None
        self.kept = None


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
