"""Survivors agree on who goes on: a set of processes, proposed by one and acknowledged by all.

Each attempt is an epoch, with keys of its own in the store that the ranks share:

| key | who writes it | when |
|---|---|---|
| `K/here/MEMBER`, `K/came` | each process | it comes to epoch K |
| `K/proposal` | the lowest that has come, once | all have come, or those that lack are lost |
| `K/seen` | each that is proposed | it has read the proposal |
| `K/outcome` | who finds it out first, once | all have read it; or somebody waited too long |

A process is lost if it has not come `settle_s` after the lowest did, and its watchdog is silent.
Whoever is not in a proposal is excluded for good. Where an outcome is a failure, because one of the
proposed died meanwhile, the others meet again in the next epoch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from mdfuse.errors import BackendError
from mdfuse.interpreter.threads import within
from mdfuse.runtime.deadline import NEVER, Deadline
from mdfuse.runtime.membership import Member, Membership
from mdfuse.runtime.watch.pulse import Pulse

if TYPE_CHECKING:
    from mdfuse.torch_private import Store

_log = logging.getLogger("mdfuse.comm")

#: Between two looks into the store, seconds.
_PAUSE_S = 0.02

#: How much longer than `settle_s` others wait for the lowest one's proposal, seconds.
_GRACE_S = 1.0

#: Between two lines about those that are waited for, seconds.
_SAYS_S = 10.0

#: How long the store may take to answer, seconds.
_ANSWER_S = 5.0

_AGREED, _FAILED = "agreed", "failed"

P = ParamSpec("P")
T = TypeVar("T")


class Excluded(Exception):
    """Others have agreed to go on without this process.

    Attributes:
        epoch: in which.
        members: those that go on, by the rank that their launcher gave them.
    """

    def __init__(self, epoch: int, members: Sequence[Member]) -> None:
        super().__init__(f"epoch {epoch} goes on without this process")
        self.epoch, self.members = epoch, tuple(members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Electorate:
    """The processes that may agree, as each of them knows them.

    Attributes:
        store: shared by all of them, for this alone.
        me: this process.
        before: the members of the communicator that is left.
        newcomers: processes that are to join.
        settle_s: how long the others are waited for, seconds.
        pulse: tells which of them live, and are waited for longer; None: nothing is known of them.
    """

    store: Store
    me: Member
    before: tuple[Member, ...]
    newcomers: tuple[Member, ...] = ()
    settle_s: float
    pulse: Pulse[Member] | None = None
    #: the keys of those that have come, which are asked for until then
    _came: set[str] = field(default_factory=set)

    def agree(self, epoch: int) -> Membership:
        """Return the processes that go on, in this epoch or a later one.

        Raises:
            Excluded: this one is not among them.
            BackendError: the store does not answer.
        """
        while True:
            members = self._proposed(epoch)
            if members is not None and self._is_agreed(epoch, members):
                return Membership(members, self.before, epoch)
            epoch += 1

    def _proposed(self, epoch: int) -> tuple[Member, ...] | None:
        """Return the proposal of an epoch; None where it came to nothing."""
        store, key = self.store, f"{epoch}/proposal"
        asked(store.set, f"{epoch}/here/{_name(self.me)}", "")
        asked(store.add, f"{epoch}/came", 1)
        everybody = sorted((*self.before, *self.newcomers))
        settled, late, before = Deadline.after(self.settle_s), NEVER, 0
        quiet = Deadline.after(self.settle_s + _SAYS_S)
        longest = Deadline.after(self.settle_s + (self.pulse.longest_s if self.pulse else 0.0))
        while not asked(store.check, [key]):
            count = asked(store.add, f"{epoch}/came", 0)
            if count > before:  # who has just come may be the lowest, and waits as long
                before, late = count, Deadline.after(self.settle_s + _GRACE_S)
            awaited = self._awaited(epoch, settled, longest)
            if awaited and not quiet.left():
                self._say(epoch, awaited, longest)
                quiet = Deadline.after(_SAYS_S)
            if count >= len(everybody) or not (settled.left() or awaited):
                present = [m for m in everybody if self._is_here(epoch, m)]
                if present and present[0] == self.me:
                    text = json.dumps(present)
                    asked(store.compare_set, key, "", text)
                    break
            if not (late.left() or awaited) and not self._decide(epoch, _FAILED):
                return None
            if self._outcome(epoch) == _FAILED:
                return None
            time.sleep(_PAUSE_S)
        members = tuple((p, n) for p, n in json.loads(asked(store.get, key)))
        if self.me in members:
            return members
        if self._settled(epoch) == _FAILED:
            return None
        raise Excluded(epoch, members)

    def _awaited(self, epoch: int, settled: Deadline, longest: Deadline) -> list[Member]:
        """Return the processes that have not come, but live, and may come yet."""
        pulse = self.pulse
        if pulse is None or settled.left() > pulse.patience_s or not longest.left():
            return []
        absent = [m for m in self.before if m != self.me and not self._is_here(epoch, m)]
        return [m for m in absent if pulse.is_alive(m)]

    def _say(self, epoch: int, awaited: Sequence[Member], longest: Deadline) -> None:
        """Say who is waited for, on the lowest that has come."""
        present = (m for m in sorted(self.before) if self._is_here(epoch, m))
        if self.pulse is None or next(present, None) != self.me:
            return
        for member in awaited:
            _log.warning(
                "rank %d waits in rebuild for rank %d, which lives but does not come: it is at %s "
                "(%.0f s at most; rebuild(settle_s=) excludes it sooner)",
                self.me[0], member[0], self.pulse.at(member), longest.left(),
            )  # fmt: skip

    def _is_here(self, epoch: int, member: Member) -> bool:
        key = f"{epoch}/here/{_name(member)}"
        if key not in self._came and asked(self.store.check, [key]):
            self._came.add(key)
        return key in self._came

    def _is_agreed(self, epoch: int, members: Sequence[Member]) -> bool:
        """Acknowledge a proposal; return whether all that it names have."""
        if asked(self.store.add, f"{epoch}/seen", 1) == len(members):
            return self._decide(epoch, _AGREED)
        return self._settled(epoch) == _AGREED

    def _settled(self, epoch: int) -> str:
        """Return the outcome of an epoch once there is one; after `settle_s` it is a failure."""
        deadline = Deadline.after(max(self.settle_s, _GRACE_S))
        while (outcome := self._outcome(epoch)) is None:
            if not deadline.left():
                return _AGREED if self._decide(epoch, _FAILED) else _FAILED
            time.sleep(_PAUSE_S)
        return outcome

    def _decide(self, epoch: int, outcome: str) -> bool:
        """Write the outcome of an epoch unless there is one; return whether it is an agreement."""
        store, key = self.store, f"{epoch}/outcome"
        return asked(store.compare_set, key, "", outcome) == _AGREED.encode()

    def _outcome(self, epoch: int) -> str | None:
        store, key = self.store, f"{epoch}/outcome"
        if not asked(store.check, [key]):
            return None
        return asked(store.get, key).decode()


def asked(question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the answer to a question of a store, which may be gone, or stopped.

    Raises:
        BackendError: there is none.
    """
    answers: list[T] = []
    within(_ANSWER_S, lambda: answers.append(question(*args, **kwargs)))
    if not answers:
        raise BackendError(
            "the store that the ranks met in does not answer",
            because="survivors agree there on who goes on; whoever kept it is gone, or stopped",
            hint="have it kept by a process that outlives ranks: mdfuse launch, one agent of "
            "torchrun for each rank",
        )
    return answers[0]


def _name(member: Member) -> str:
    return f"{member[0]}.{member[1]}"
