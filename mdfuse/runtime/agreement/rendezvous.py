"""Meetings of all ranks through a store, outside any collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from mdfuse.errors import BackendError, MdfuseError
from mdfuse.interpreter.threads import within
from mdfuse.runtime.deadline import Deadline

if TYPE_CHECKING:
    from mdfuse.torch_private import Store

#: The count of arrivals has the number of ranks with a text above this bit, so that a meeting
#: without texts costs each rank one arrival and one wait, for any number of ranks.
_TEXTS = 32

#: How long the store may take to answer after an error, seconds.
ANSWER_S = 1.0


def raise_alike(
    problem: BaseException | None,
    said: Sequence[str | None],
    elsewhere: Callable[[int, str], MdfuseError],
) -> None:
    """Raise on every rank if one has a problem; each calls it with the result of a meeting.

    Args:
        problem: this rank's own.
        said: for each rank, None or its problem.
        elsewhere: returns the error for another rank's problem, from rank and text.
    """
    if problem is not None:
        raise problem
    for rank, text in enumerate(said):
        if text is not None:
            error = elsewhere(rank, text)
            error.follows = True
            raise error


#: Waits for a key of a store, until a deadline.
Wait = Callable[["Store", str, Deadline], None]


def _wait(store: Store, key: str, deadline: Deadline) -> None:
    store.wait([key], deadline.left_for_store())


class Meetings:
    """The meetings of all ranks, which are numbered.

    The last rank to arrive at meeting s + 1 deletes the keys of meeting s, which all have left by
    then. So the store holds the keys of two meetings and one key per rank.

    Args:
        store: shared by all ranks; nobody else uses its keys.
        rank: this rank.
        size: the number of ranks.
        timeout_s: how long to wait for the others, seconds.
        wait: waits for a key until a deadline, or raises RuntimeError.

    Attributes:
        size: the number of ranks that meet; 1 under backend "null", for any size of the world.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, wait: Wait = _wait
    ) -> None:
        self._store = store
        self._wait = wait
        self._rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._meeting = 0
        self._with_text: tuple[int, ...] = ()

    def exchange(
        self, text: str | None, deadline: Deadline | None = None
    ) -> tuple[str | None, ...]:
        """Give this rank's text, or None, and return every rank's, in rank order.

        The wait ends at the deadline, by default `timeout_s` from now.

        Raises:
            BackendError: not all ranks arrived in time; the message names those that did not.
        """
        if self.size == 1:
            return (text,)
        before, deadline = self._with_text, deadline or Deadline.after(self._timeout_s)
        try:
            self._with_text = self._meet(text, before, deadline)
            texts: list[str | None] = [None] * self.size
            for rank in self._with_text:
                texts[rank] = self._store.get(f"{self._meeting}/text/{rank}").decode()
        except RuntimeError as error:
            raise self._absence(self._meeting, error) from error
        self._meeting += 1
        return tuple(texts)

    def give_up(self) -> None:
        """Let ranks that wait in the next meeting go on, with an error: this one will not come."""
        if self.size > 1:
            self._store.set(f"{self._meeting}/go", "")

    @property
    def meeting(self) -> int:
        """The number of the next meeting."""
        return self._meeting

    def leave(self, grace_s: float) -> list[int]:
        """Say goodbye, and wait up to `grace_s` seconds until all other ranks have.

        Returns:
            the ranks that have not; none where `grace_s` is 0.
        """
        if self.size == 1:
            return []
        self._store.set(f"bye/{self._rank}", "")
        if self._store.add("bye", 1) == self.size:
            self._store.set("bye/all", "")
        if not grace_s:
            return []
        try:
            self._store.wait(["bye/all"], timedelta(seconds=grace_s))
        except RuntimeError:
            return [r for r in range(self.size) if not self._store.check([f"bye/{r}"])]
        return []

    def _meet(
        self, text: str | None, before: tuple[int, ...], deadline: Deadline
    ) -> tuple[int, ...]:
        """Arrive, wait for the others, and return the ranks that left a text."""
        store, meeting = self._store, self._meeting
        store.set(f"at/{self._rank}", str(meeting))
        if text is not None:
            store.set(f"{meeting}/text/{self._rank}", text)
        arrived = store.add(f"{meeting}/in", 1 if text is None else 1 + (1 << _TEXTS))
        if arrived & ((1 << _TEXTS) - 1) < self.size:
            self._wait(store, f"{meeting}/go", deadline)
            arrived = store.add(f"{meeting}/in", 0)  # a get would take two round trips
            if arrived & ((1 << _TEXTS) - 1) < self.size:
                raise RuntimeError("a rank gave up the meeting: others are lost")
            return self._find_texts(arrived)
        with_text = self._find_texts(arrived)
        store.set(f"{meeting}/go", "")
        if meeting:
            self._forget(meeting - 1, before)
        return with_text

    def _find_texts(self, arrived: int) -> tuple[int, ...]:
        if not arrived >> _TEXTS:
            return ()
        keys = ((r, f"{self._meeting}/text/{r}") for r in range(self.size))
        return tuple(r for r, key in keys if self._store.check([key]))

    def _forget(self, meeting: int, with_text: tuple[int, ...]) -> None:
        for name in ("in", "go", *(f"text/{rank}" for rank in with_text)):
            self._store.delete_key(f"{meeting}/{name}")

    def _absence(self, meeting: int, error: RuntimeError) -> BackendError:
        missing: list[int] = []

        def ask() -> None:
            for rank in range(self.size):
                key = f"at/{rank}"
                if not self._store.check([key]) or int(self._store.get(key)) < meeting:
                    missing.append(rank)

        is_known = within(ANSWER_S, ask)  # perhaps the store itself does not answer
        late = f"waited {self._timeout_s:g} s for ranks {missing}"
        lost = "lost the store that all ranks meet in"
        return BackendError(
            f"rank {self._rank} {late if is_known and missing else lost}",
            where=f"meeting {meeting} of all {self.size} ranks",
            because=str(error).split("\n", 1)[0],
            hint="see what those ranks did instead; raise timeout_s where they are only slow",
        )
