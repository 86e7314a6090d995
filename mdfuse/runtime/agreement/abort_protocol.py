"""Runs that a rank refused or left, and whether the ranks can go on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

from mdfuse.backends.work import first_line
from mdfuse.errors import BackendError, ProgramError, message_of
from mdfuse.interpreter.threads import within
from mdfuse.runtime.agreement.rendezvous import ANSWER_S
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.runtime.watch.reports import tell_torchrun, untell_torchrun
from mdfuse.torch_private import Store

_ALL_REFUSED = "all ranks refused it"
_BEGUN = "other ranks had begun it"


@dataclass(slots=True, kw_only=True)
class Refusals:
    """The messages that ranks leave in the store about runs that they refused or left.

    Where all ranks refuse a run, nothing of it was posted, and they go on. Otherwise the next post
    of a rank could meet one of another run, so that no rank runs anything any more.

    Attributes:
        store: shared by all ranks.
        rank: this rank.
        size: the number of ranks.
        timeout_s: how long to wait for the messages of the others, seconds.
        waiting: makes a context for such a wait, from a text that names the wait.
    """

    store: Store
    rank: int
    size: int
    timeout_s: float
    waiting: Callable[[str], AbstractContextManager[None]]
    #: the run that this rank refused, until it is known whether others had begun it
    refused: str | None = None
    #: the reason why ranks may be at different communications
    broken: str | None = None

    def refuse(self, occasion: str, problem: BaseException) -> None:
        """Leave the reason why this rank does not take part in a run."""
        self.refused = occasion
        tell_torchrun(problem)  # before others fail for it, even if it is caught here

        def leave_word() -> None:
            self.store.set(f"refused/{occasion}", self._word("refused it", message_of(problem)))
            if self.store.add(f"refusals/{occasion}", 1) == self.size:
                self.store.set(f"settled/{occasion}", _ALL_REFUSED)

        within(ANSWER_S, leave_word)

    def abandon(self, tally: RunCount, error: BaseException) -> None:
        """Note that an error ended a run on this rank, perhaps between two posts; leave a message.

        Others may have finished that run, and wait in the next one.
        """
        self.broken = self.broken or f"{type(error).__name__} ended a run of @{tally.name} here"
        tell_torchrun(error)

        def leave_word() -> None:
            next_one = f"{tally.serial}/{tally.runs + 1}"
            self.store.set(f"refused/{tally.occasion}", self._word("left it", message_of(error)))
            self.store.set(
                f"refused/{next_one}", self._word("left the one before", message_of(error))
            )
            self.store.set(f"settled/{tally.occasion}", _BEGUN)

        within(ANSWER_S, leave_word)

    def _word(self, deed: str, reason: str) -> str:
        return f"another rank {deed}\nrank {self.rank}: {reason}"

    def broke_off(self, tally: RunCount, error: BackendError) -> ProgramError | None:
        """Note that a communication of the run that began last broke on this rank.

        Returns:
            the error with the words of a rank that refused or left the run; None where none did, or
            the store does not answer.
        """
        self.broken = self.broken or f"a communication broke ({first_line(error)})"
        messages: list[str] = []

        def ask() -> None:
            if self.store.check([f"refused/{tally.occasion}"]):
                self.store.set(f"settled/{tally.occasion}", _BEGUN)
                messages.append(self.store.get(f"refused/{tally.occasion}").decode())

        within(ANSWER_S, ask)
        if not messages:
            return None
        why, *words = messages[0].splitlines()
        return ProgramError(
            f"@{tally.name} broke off on rank {self.rank}: {why}",
            where=words,
            because="all ranks run, or none does",
            follows=True,
        )

    def settle(self) -> None:
        """Wait until it is known whether ranks may run programs again; return where they may.

        Raises:
            BackendError: they may not.
        """
        if self.broken is None and self.refused is not None:
            word = self._verdict(f"settled/{self.refused}")
            self.refused = None
            if word != _ALL_REFUSED:
                self.broken = f"it refused a run, and {word}"
        if self.broken is not None:
            raise BackendError(
                f"rank {self.rank} runs no program that communicates any more",
                because=f"{self.broken}: ranks may be at different communications",
                hint="close() the communicator and call mdfuse.init() again, on all ranks",
            )
        untell_torchrun()

    def _verdict(self, key: str) -> str:
        try:
            with self.waiting("word whether other ranks ran what this one refused"):
                self.store.wait([key], timedelta(seconds=self.timeout_s))
                return self.store.get(key).decode()
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
