"""The ranks' positions in the store: each writes its own regularly, and reads when needed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, TypeVar

from mdfuse.interpreter.processes import Process, this_process
from mdfuse.interpreter.threads import within
from mdfuse.runtime.deadline import NEVER, Deadline
from mdfuse.runtime.watch.positions import Position
from mdfuse.runtime.watch.pulse import Pulse

if TYPE_CHECKING:
    from mdfuse.torch_private import Store

T = TypeVar("T")

#: The word of a rank that ends posts of its device.
_ENDING = "ending"

#: The words on a rank in a meeting, and those on the meeting; the first one stays.
_NOTED, _MISSED = "noted", "missed"
_MET, _LATE = "met", "late"


@dataclass(slots=True)
class Answers:
    """The positions of other ranks, as read from the store after a wait broke.

    Attributes:
        positions: by rank; ranks that never told any are absent.
        is_complete: the store answered every question in time.
    """

    positions: dict[int, Position] = field(default_factory=dict)
    is_complete: bool = False


def patience_of(beat_s: float) -> float:
    """Return the age of a rank's last word at which it is called gone, seconds."""
    return 3 * beat_s + 1.0


@dataclass(eq=False)
class Bulletin:
    """The ranks' positions in the store.

    A rank that dies, or is stopped, or whose host is cut off, stops writing, which others notice.

    Attributes:
        store: keys and connection are used for nothing else: a connection on which the program
            waits would block the watchdog.
        rank: this rank.
        beat_s: seconds between two positions of a rank.
        size: how many ranks there are.
        is_lost: the connection broke: another request would only make torch log it again.
        is_broken: a rank said that a communication broke.
        is_ending: a rank is about to end the posts of its device.
        heard: the message of the first rank that raised an alarm.
        gone: ranks of this host whose processes have ended without a word.
        has_come: this rank had noted its results before others ended their posts.
    """

    store: Store
    rank: int
    beat_s: float
    size: int = 0
    is_lost: bool = False
    is_broken: bool = False
    is_ending: bool = False
    heard: str = ""
    gone: set[int] = field(default_factory=set)
    has_come: bool = False
    #: this process, and others of this host, by rank; all have told theirs
    _here: Process | None = None
    _near: dict[int, Process] = field(default_factory=dict)
    _are_all_known: bool = False
    #: other ranks that have told a position: the store has their keys
    _are_told: set[int] = field(default_factory=set)
    _beat: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    #: thread -> the start of its pending request to the store, by the monotonic clock
    _asked: dict[int, float] = field(default_factory=dict)

    def tell(self, position: Position) -> None:
        """Tell the others the position of this rank."""
        if self.is_lost:  # and another thread may wait for it, and hold the lock
            return
        with self._lock:  # two threads write; beats must be in order
            if self._beat == 0:
                self._introduce()
            self._beat += 1
            stamped = replace(position, beat=self._beat, time=time.time())
            self._set(f"at/{self.rank}", stamped.encode())

    def hear(self) -> None:
        """Read the alarm that a rank raised, if there is one."""
        broken = self._get("broken")
        self.is_broken = self.is_broken or broken is not None
        self.is_ending = self.is_ending or broken == _ENDING
        if not self.heard:
            self.heard = self._get("alarm") or ""

    def _introduce(self) -> None:
        """Tell the other processes of this host which one this is."""
        with suppress(OSError):  # /proc does not show it
            self._here = process = this_process()
            place = self._add(f"host/{process.host}", 1)
            self._set(f"host/{process.host}/{place}", json.dumps([self.rank, asdict(process)]))
        self._add("told", 1)

    def look_around(self) -> None:
        """See which processes of this host have ended without a word."""
        if self._here is not None and not self._are_all_known:
            self._are_all_known = self._look_for(f"host/{self._here.host}")
        for rank in [r for r, process in self._near.items() if process.has_ended()]:
            at = None if rank in self.gone else self._read(rank)
            if at is not None and not at.ended:
                self.gone.add(rank)

    def _look_for(self, host: str) -> bool:
        """Read which processes this host has; return whether all ranks have told theirs."""
        are_all_there = self._add("told", 0) == self.size
        for place in range(len(self._near) + 1, (self._add(host, 0) or 0) + 1):
            text = self._get(f"{host}/{place}")
            if text is None:  # it is just being written
                return False
            rank, process = json.loads(text)
            self._near[rank] = Process(**process)
        return are_all_there

    def break_off(self) -> None:
        """Tell the others that a communication broke, so that they wait for this rank no more."""
        self._settle("broken", _ENDING if self.is_ending else "")

    def come(self) -> None:
        """Tell the others that this rank has noted its results, and waits for no new ones."""
        if not self.has_come:
            self.has_come = self._settle(f"word/{self.rank}", _NOTED) == _NOTED

    def meet(self, ranks: Iterable[int], limit: Deadline) -> bool:
        """Come, and wait until each rank has come or has told nothing new for the time of `gather`.

        A rank that told nothing new, or whose process has ended, is missed: it hears so once it
        comes. One that was silent for a report only is waited for: it may be busy. The first rank
        that meets convenes the others: it alone looks for them. Where it dies, another one does.

        Args:
            ranks: all, with this one.
            limit: for all this.

        Returns:
            False: it took too long, or the store is lost.
        """
        words = [""]

        def ask() -> None:
            self.is_ending = True
            self.break_off()
            self.come()
            words.append(self._convened([*ranks], limit))

        return within(limit.left() + 0.5, ask) and words[-1] == _MET

    def _convened(self, ranks: Sequence[int], limit: Deadline) -> str:
        """Return the word on the meeting, from who convenes it: this rank, where no other does."""
        pulse, term = Pulse(self.position_of, self._patience_s), 0
        while (word := self._get("meeting")) is None and limit.left():
            convener = self._settle(f"convener/{term}", f"{self.rank}")
            if convener == f"{self.rank}":
                return self._convene(ranks, pulse, limit)
            if convener is None:
                break
            if self._lives(int(convener), pulse):
                time.sleep(limit.left(self.beat_s / 5))
            else:
                term += 1
        return word or _LATE

    def _convene(self, ranks: Sequence[int], pulse: Pulse[int], limit: Deadline) -> str:
        """Wait until there is a word on each rank; return that on the meeting."""
        words = [f"word/{rank}" for rank in ranks]
        while not self._ask(lambda: self.store.check(words)):
            if self.is_lost or not limit.left():
                return self._settle("meeting", _LATE) or _LATE
            for rank in [r for r in ranks if not self._lives(r, pulse)]:
                self._settle(f"word/{rank}", _MISSED)
            time.sleep(limit.left(self.beat_s / 5))
        return self._settle("meeting", _MET) or _LATE

    def _lives(self, rank: int, pulse: Pulse[int]) -> bool:
        return rank not in self.gone and pulse.is_alive(rank)

    def alarm(self, text: str) -> None:
        """Leave an alarm for ranks that fail once this rank is gone."""
        if not self.heard:
            self._set("alarm", text)

    def refusal(self, occasion: str) -> str | None:
        """Return the message of a rank that refused or left a run, or None."""
        return self._get(f"refused/{occasion}")

    def gather(self, ranks: Iterable[int], ending: Deadline = NEVER) -> Answers:
        """Return the positions of other ranks, once each that lives has told a new one.

        It takes up to three beats and a second, where a rank is silent or the store does not
        answer. A store that `give_up` gave up is not asked.

        Args:
            ranks: the ranks to ask for; this one is left out.
            ending: when this process stops waiting for others.
        """
        answers, asked = Answers(), [rank for rank in ranks if rank != self.rank]
        grace_s = max(ending.left(self._patience_s) - 0.5, 0.0)

        def ask() -> None:
            self._gather(asked, answers.positions, grace_s)
            answers.is_complete = not self.is_lost

        if not within(grace_s + 0.5, ask):
            self.is_lost = True
        return answers

    def position_of(self, rank: int) -> Position | None:
        """Return the last position that a rank told; None: it left, or nothing is known."""
        at = self._read(rank)
        return None if at is None or at.ended else at

    @property
    def _patience_s(self) -> float:
        return patience_of(self.beat_s)

    def give_up(self) -> None:
        """Give up the store where a thread has waited too long for its answer already."""
        asked = min(list(self._asked.values()), default=inf)  # a copy: threads come and go
        self.is_lost = self.is_lost or time.monotonic() - asked > self._patience_s

    def linger(self, others: Mapping[int, Position], ending: Deadline = NEVER) -> None:
        """Wait shortly until other ranks that report have read: this process may host the store."""
        ranks = [rank for rank, at in others.items() if at.is_hanging]
        most_s = ending.left(3 * self.beat_s)
        within(most_s + 0.5, lambda: self._linger(ranks, Deadline.after(most_s)))

    def _linger(self, ranks: list[int], deadline: Deadline) -> None:
        while ranks and deadline.left():
            time.sleep(deadline.left(self.beat_s / 5))
            ranks = [rank for rank, at in self._read_all(ranks).items() if at.is_hanging]

    def _gather(self, ranks: list[int], positions: dict[int, Position], grace_s: float) -> None:
        """Read positions into `positions` until each rank has told a new one, or time is up.

        Ranks that told none are marked as silent; where time was short, only those whose last
        position is old.
        """
        deadline, is_long = Deadline.after(grace_s), grace_s >= 2 * self.beat_s
        first: dict[int, int] = {}
        while ranks and not self.is_lost:
            silent, read = [], self._read_all(ranks)
            for rank in ranks:
                at = read.get(rank)
                if at is not None:
                    positions[rank] = at
                beat = first.setdefault(rank, at.beat if at else 0)
                if rank in self.gone and at is not None:
                    positions[rank] = replace(at, silent_s=_age_s(at))
                elif at is None or not (at.beat > beat or at.is_hanging or at.ended):
                    silent.append(rank)
            ranks = silent
            if not deadline.left():
                break
            time.sleep(deadline.left(self.beat_s / 5) if ranks else 0)
        for rank in ranks:
            if rank in positions:
                age = _age_s(positions[rank])
                if is_long or age > 2 * self.beat_s:
                    positions[rank] = replace(positions[rank], silent_s=age)

    def _read(self, rank: int) -> Position | None:
        text = self._get(f"at/{rank}")
        return None if text is None else Position.decode(text)

    def _read_all(self, ranks: Sequence[int]) -> dict[int, Position]:
        """Return the last positions of those ranks that have told one.

        It is one question, as a rule: where all ranks report at once, each asks for all others.
        """
        unknown = [rank for rank in ranks if rank not in self._are_told]
        if unknown and not self._check(unknown):
            unknown = [rank for rank in unknown if self._check([rank])]
        self._are_told.update(unknown)
        known = [rank for rank in ranks if rank in self._are_told]
        keys = [f"at/{rank}" for rank in known]
        texts = (self._ask(lambda: self.store.multi_get(keys)) if keys else None) or []
        return {rank: Position.decode(x.decode()) for rank, x in zip(known, texts, strict=False)}

    def _check(self, ranks: Iterable[int]) -> bool:
        return bool(self._ask(lambda: self.store.check([f"at/{rank}" for rank in ranks])))

    def _set(self, key: str, text: str) -> None:
        self._ask(lambda: self.store.set(key, text))

    def _add(self, key: str, count: int) -> int | None:
        return self._ask(lambda: self.store.add(key, count))

    def _settle(self, key: str, text: str) -> str | None:
        """Write a text, unless there is one; return the one that stays."""
        return self._ask(lambda: self.store.compare_set(key, "", text).decode())

    def _get(self, key: str) -> str | None:
        def get() -> str | None:
            return self.store.get(key).decode() if self.store.check([key]) else None

        return self._ask(get)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the store's answer; after a failure the store counts as lost, and answers None."""
        if self.is_lost:
            return None
        thread = threading.get_ident()
        self._asked[thread] = time.monotonic()
        try:
            return question()
        except RuntimeError:
            self.is_lost = True
            return None
        finally:
            del self._asked[thread]


def _age_s(at: Position) -> float:
    """Return the time since a rank told its position, seconds."""
    return max(time.time() - at.time, 0.1)
