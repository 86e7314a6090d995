"""Agreement of the ranks on each test, through the store and so outside any collective."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from multirank.process import Process, this_process

if TYPE_CHECKING:
    from torch.distributed import Store

#: How long a rank may still take once another one has failed. It is probably stuck, in a collective
#: that the failed rank never entered.
GRACE_S = 5.0


class Agreement:
    """Meetings of all ranks, each under a name that is used once.

    A meeting always ends: with everybody's answer, or with None for a rank that has exited or takes
    too long. That sets it apart from the communicator's own agreement, which may only time out.

    Args:
        store: shared by all ranks.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        from torch.distributed import PrefixStore

        self._store = PrefixStore("multirank", store)
        self._rank = rank
        self._size = size
        self._processes = self._introduce()
        self._visible = {rank for rank, at in self._processes.items() if at.is_visible()}

    def settle(self, name: str, own: str, patience_s: float) -> dict[int, str | None]:
        """Give this rank's answer, "" for all is well; get every rank's, None for a missing one."""
        answers: dict[int, str | None] = dict.fromkeys(range(self._size))
        answers[self._rank] = own
        with contextlib.suppress(RuntimeError):  # the store went away, with the rank that hosts it
            self._store.set(f"{name}/{self._rank}", own)
            self._collect(name, answers, time.monotonic() + patience_s)
        return answers

    def stacks_of(self, ranks: Iterable[int]) -> str:
        """What those ranks are doing, as far as it can be known from here."""
        return "\n".join(self._processes[r].dump_stacks() for r in ranks)

    def announce_reported(self) -> None:
        """As rank 0: let the others exit."""
        with contextlib.suppress(RuntimeError):
            self._store.set("reported", "")

    def await_reported(self) -> None:
        """Wait until rank 0 has reported, or has gone."""
        self._wait_for("reported", 0)

    def meet_last(self) -> None:
        """Part in peace: the rank that hosts the store, rank 0, leaves when it has served all."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"end/{self._rank}", "")
        if self._rank == 0:
            for rank in range(1, self._size):
                self._wait_for(f"end/{rank}", rank)

    def linger(self) -> None:
        """Give the rank that reports the time to do so."""
        self._wait_for("never", self._rank)

    def _introduce(self) -> dict[int, Process]:
        """Exchange who is where."""
        self._store.set(f"process/{self._rank}", this_process(self._rank).to_text())
        texts = [self._store.get(f"process/{rank}").decode() for rank in range(self._size)]
        return {rank: Process.from_text(text) for rank, text in enumerate(texts)}

    def _is_known_dead(self, rank: int) -> bool:
        return rank in self._visible and not self._processes[rank].is_visible()

    def _collect(self, name: str, answers: dict[int, str | None], deadline: float) -> None:
        missing = {rank for rank, answer in answers.items() if answer is None}
        while missing:
            # Look who is dead before looking for answers: who died may have answered before.
            dead = {rank for rank in missing if self._is_known_dead(rank)}
            for rank in sorted(missing):
                if self._store.check([f"{name}/{rank}"]):
                    answers[rank] = self._store.get(f"{name}/{rank}").decode()
                    missing.discard(rank)
            if dead or any(answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if missing <= dead or time.monotonic() > deadline:
                return
            time.sleep(0.002)

    def _wait_for(self, key: str, rank: int) -> None:
        """Wait until `rank` has set the key, has exited, or has had its time."""
        deadline = time.monotonic() + 2 * GRACE_S
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and not self._store.check([key]):
                if self._is_known_dead(rank):
                    return
                time.sleep(0.01)
