"""What the watchdogs of the ranks tell each other, and the report that comes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from mdfuse.backends.noting import Subject
from mdfuse.errors import BackendError

if TYPE_CHECKING:
    from mdfuse.backends.c10d_groups import Store
    from mdfuse.runtime.watch import Post

#: How many of the last posts a report lists.
_LAST = 8

#: How many ranks a report lists one by one.
_RANKS = 16


class Progress(NamedTuple):
    """How far a rank is in one family of a team's posts.

    Attributes:
        family: what is numbered together.
        team: the ranks.
        posted: the number of the last one posted.
        done: the number of the last one such that it and all before it are done.
        last: the last one posted, in words.
    """

    family: str
    team: tuple[int, ...]
    posted: int
    done: int
    last: str


@dataclass(frozen=True, slots=True)
class Position:
    """How far a rank is.

    Attributes:
        rank: the rank.
        is_hanging: whether its own watchdog raised the alarm.
        progress: by family and team.
        host: the line of the program where its host is, or "".
    """

    rank: int
    is_hanging: bool
    progress: tuple[Progress, ...]
    host: str

    def of(self, family: str, team: tuple[int, ...]) -> Progress:
        """Its progress in one family of one team."""
        found = (p for p in self.progress if (p.family, p.team) == (family, team))
        return next(found, Progress(family, team, 0, 0, ""))

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Position:
        raw = json.loads(text)
        progress = (Progress(f, tuple(team), *rest) for f, team, *rest in raw.pop("progress"))
        return cls(progress=tuple(progress), **raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Why the watchdog ends the process.

    Attributes:
        team: whose communication it is.
        what: the fact.
        details: where in the program, how much, how long ago; or "".
        sequence: the number of the post that is overdue, or 0.
        subject: what was posted, or None.
    """

    team: tuple[int, ...]
    what: str
    details: str = ""
    sequence: int = 0
    subject: Subject | None = None

    @classmethod
    def of(cls, post: Post, rank: int, timeout_s: float, age_s: float) -> Alarm:
        """The alarm over a post that is not done."""
        subject = post.subject
        name = f"{subject.kind} #{post.sequence} on team {_team_text(subject.team)}"
        age = f"posted {age_s:.1f} s ago (timeout_s={timeout_s:g})"
        return cls(
            team=subject.team,
            what=f"{name} is not done on rank {rank}",
            details=f"{subject.where}   {bytes_text(subject.bytes)}, {age}",
            sequence=post.sequence,
            subject=subject,
        )


class Bulletin:
    """The ranks' positions, in the store.

    A rank whose watchdog raises the alarm sets one key, and its position. Every watchdog looks at
    that key now and then, and answers with its own position.

    Args:
        store: nobody else uses its keys. A clone of it is used: a connection that the program
            waits on would block the watchdog.
        rank: this rank.
        poll_s: seconds between looks at the key.
    """

    def __init__(self, store: Store, rank: int, poll_s: float) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
        self._rank = rank
        self._poll = poll_s
        self._grace = 2 * poll_s + 1.0
        self._looked_at = float("-inf")
        self._has_answered = False

    def is_asked(self, now: float) -> bool:
        """Whether another rank raised the alarm and this one did not answer yet."""
        if self._has_answered or now - self._looked_at < self._poll:
            return False
        self._looked_at = now
        try:
            return bool(self._store.check(["alarm"]))
        except RuntimeError:  # the store is gone, and with it whoever could ask
            return False

    def publish(self, position: Position) -> None:
        """Tell the others how far this rank is."""
        self._has_answered = True
        self._set(f"at/{self._rank}", position.encode())

    def call(self, position: Position) -> None:
        """Raise the alarm."""
        self.publish(position)
        self._set("alarm", str(self._rank))

    def answers(self, team: Sequence[int]) -> dict[int, Position]:
        """The positions of the team's other members that answer in time."""
        asked = [rank for rank in team if rank != self._rank]
        self._wait_for([f"at/{rank}" for rank in asked])
        found = ((rank, self._get(f"at/{rank}")) for rank in asked)
        return {rank: Position.decode(text) for rank, text in found if text is not None}

    def linger(self, others: Mapping[int, Position]) -> None:
        """Let ranks that report too read first: this process may host the store."""
        self._set(f"told/{self._rank}", "")
        self._wait_for([f"told/{rank}" for rank, at in others.items() if at.is_hanging])

    def _wait_for(self, keys: list[str]) -> None:
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline:
            try:
                keys = [key for key in keys if not self._store.check([key])]
            except RuntimeError:
                return
            if not keys:
                return
            time.sleep(self._poll / 5)

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError:
            return

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError:
            return None


def report(
    alarm: Alarm, own: Position, others: Mapping[int, Position], posts: Sequence[Post]
) -> str:
    """The text that the watchdog leaves behind."""
    where = [alarm.details, f"rank {own.rank}: its host is at {own.host or 'no line of Python'}"]
    where += _ranks(alarm, own, others)
    where += _last(posts)
    error = BackendError(
        alarm.what,
        where=where,
        because="all members of a team post the same, in one order; this process ends now",
        hint=_hint(alarm, others),
    )
    return f"mdfuse.BackendError: {error}"


def _ranks(alarm: Alarm, own: Position, others: Mapping[int, Position]) -> list[str]:
    """What the other members did, those that did the same together."""
    said: dict[str, list[int]] = {}
    for rank in alarm.team:
        if rank != own.rank:
            said.setdefault(_verdict(alarm, others.get(rank)), []).append(rank)
    return [f"{_ranks_text(ranks)} {text}" for text, ranks in said.items()]


def _verdict(alarm: Alarm, at: Position | None) -> str:
    if at is None:
        return "no answer: the process ended, or is stuck where no thread of Python can run"
    host = f"; its host is at {at.host}" if at.host else ""
    if alarm.subject is None:
        return f"answers{host}"
    progress = at.of(alarm.subject.family, alarm.team)
    if not alarm.subject.is_shared:
        counts = f"{progress.posted} {progress.family}, {progress.done} of them done"
        return f"posted {counts}, last {progress.last or 'none'}{host}"
    if progress.posted < alarm.sequence:
        last = progress.last or "nothing there"
        return f"has not posted it: it is at {last}{host}"
    if progress.done >= alarm.sequence:
        return f"is done with it{host}"
    return "has posted it, and waits too"


def _hint(alarm: Alarm, others: Mapping[int, Position]) -> str:
    behind = [rank for rank in alarm.team if rank in others and _is_behind(alarm, others[rank])]
    if behind:
        return f"see what {_ranks_text(behind)} did instead; where it is only slow, raise timeout_s"
    return "see the log of each rank; where they are only slow, raise timeout_s"


def _is_behind(alarm: Alarm, at: Position) -> bool:
    subject = alarm.subject
    if subject is None or not subject.is_shared:
        return False
    return at.of(subject.family, alarm.team).posted < alarm.sequence


def _last(posts: Sequence[Post]) -> list[str]:
    lines = []
    for post in posts[-_LAST:]:
        state = "done" if post.is_done(post.sequence) else "not done"
        team = _team_text(post.subject.team)
        lines.append(f"posted {post.text()} on team {team}, {state}")
    return lines


def _team_text(team: Sequence[int]) -> str:
    if len(team) <= _RANKS:
        return str(tuple(team))
    return f"({', '.join(map(str, team[:3]))}, ... {team[-1]}: {len(team)} ranks)"


def _ranks_text(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    text = ", ".join(map(str, ranks[:_RANKS]))
    more = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{more}"


def bytes_text(count: int) -> str:
    """A size as reports say it."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}" if unit == "bytes" else f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"
