"""Refused runs: which rank refused one, whether others had begun it, and if ranks can go on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

from mdfuse.backends.c10d.groups import Store
from mdfuse.backends.work import first_line
from mdfuse.errors import BackendError, ProgramError
from mdfuse.runtime.agreement.meetings import ANSWER_S
from mdfuse.runtime.watch.bulletin import within
from mdfuse.runtime.watch.running import RunCount

_ALL_REFUSED = "all ranks refused it"
_BEGUN = "other ranks had begun it"


class Refusals:
    """The words that ranks leave in the store about runs that they refused, or that broke off.

    Where all ranks refuse a run, nothing of it was posted, and they go on. Otherwise the next post
    of a rank could meet one of another run, so that no rank runs anything any more.

    Args:
        store: shared by all ranks.
        rank: this rank.
        size: the number of ranks.
        timeout_s: how long to wait for what the others say, seconds.
        waiting: makes a context for such a wait, from a text that says what it waits for.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._waiting = waiting
        #: the run that this rank refused, until it is known whether others had begun it
        self._refused: str | None = None
        #: why ranks may be at different communications
        self._broken: str | None = None

    def refuse(self, occasion: str, reason: str) -> None:
        """Leave word why this rank does not take part in a run."""
        self._refused = occasion

        def leave_word() -> None:
            self._store.set(f"refused/{occasion}", f"rank {self._rank}: {reason}")
            if self._store.add(f"refusals/{occasion}", 1) == self._size:
                self._store.set(f"settled/{occasion}", _ALL_REFUSED)

        within(ANSWER_S, leave_word)

    def broke_off(self, tally: RunCount, error: BackendError) -> ProgramError | None:
        """Note that a communication of a run broke on this rank.

        Args:
            tally: of the program; the run is the one that began last.
            error: what the communication raised.

        Returns:
            the error with the words of a rank that refused the run; None where none did, or the
            store does not answer.
        """
        self._broken = self._broken or f"a communication broke ({first_line(error)})"
        found: list[str] = []

        def ask() -> None:
            if self._store.check([f"refused/{tally.occasion}"]):
                self._store.set(f"settled/{tally.occasion}", _BEGUN)
                found.append(self._store.get(f"refused/{tally.occasion}").decode())

        within(ANSWER_S, ask)
        if not found:
            return None
        return ProgramError(
            f"@{tally.name} broke off on rank {self._rank}: another rank refused it",
            where=found[0].splitlines(),
            because="all ranks run, or none does",
        )

    def settle(self) -> None:
        """Wait until it is known whether ranks may run programs again; return where they may.

        Raises:
            BackendError: they may not.
        """
        if self._broken is None and self._refused is not None:
            word = self._verdict(f"settled/{self._refused}")
            self._refused = None
            if word != _ALL_REFUSED:
                self._broken = f"it refused a run, and {word}"
        if self._broken is not None:
            raise BackendError(
                f"rank {self._rank} runs no program that communicates any more",
                because=f"{self._broken}: ranks may be at different communications",
                hint="close() the communicator and call mdfuse.init() again, on all ranks",
            )

    def _verdict(self, key: str) -> str:
        try:
            with self._waiting("word whether other ranks ran what this one refused"):
                self._store.wait([key], self._timeout)
                return self._store.get(key).decode()
        except RuntimeError as error:
            return f"not all others said that they did ({first_line(error)})"


def not_open(rank: int, what: str, is_fork: bool) -> BackendError:
    """Return the error of using a communicator that is closed, or belongs to the parent process."""
    if is_fork:
        return BackendError(
            f"rank {rank} cannot {what} here: this process is a fork of it",
            because="a fork has neither its threads nor connections of its own",
            hint="communicate in the process that called mdfuse.init() only; processes that "
            "are to be ranks are started by a launcher, or fork before init()",
        )
    return BackendError(
        f"rank {rank} cannot {what}: its communicator is closed",
        because="close() gave up its groups and its store",
        hint="call mdfuse.init() again, on all ranks",
    )
