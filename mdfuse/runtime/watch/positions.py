"""Positions: the progress of a rank, as it knows it and as it tells the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from mdfuse.runtime.watch.plan_position import ActiveStep
from mdfuse.runtime.watch.tallies import Key, Tallies, key_of


class Progress(NamedTuple):
    """The progress of a rank in one family of a team's posts.

    Attributes:
        family: the posts of one family and team are numbered together.
        team: the ranks.
        posted: the number of the last one posted.
        done: the number of the last one such that it and all before it are done.
        last: the last one posted, in words; "" where unknown.
    """

    family: str
    team: tuple[int, ...]
    posted: int
    done: int
    last: str


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a rank, as it tells the others.

    Attributes:
        rank: the rank.
        is_hanging: whether it is about to report a communication that broke or hangs.
        progress: by family and team.
        host: the line of the program where its host is, or "".
        doing: its wait, or its instruction, in words; or "".
        ended: the way it left the others, in words; or "".
        beat: the number of times it told the others.
        time: of the last time, seconds since the epoch, by its own clock.
        silent_s: set by the reader: for how many seconds the rank has told nothing, when it should.
    """

    rank: int
    is_hanging: bool
    progress: tuple[Progress, ...]
    host: str
    doing: str = ""
    ended: str = ""
    beat: int = 0
    time: float = 0.0
    silent_s: float = 0.0

    def of(self, family: str, team: tuple[int, ...]) -> Progress:
        """Return the rank's progress in one family of one team."""
        matching = (p for p in self.progress if (p.family, p.team) == (family, team))
        return next(matching, Progress(family, team, 0, 0, ""))

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Position:
        raw = json.loads(text)
        progress = (Progress(f, tuple(team), *numbers) for f, team, *numbers in raw.pop("progress"))
        return cls(progress=tuple(progress), **raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPosition:
    """The position of this process in its plans; a `Position` is the form told to others.

    Attributes:
        key: differs once the process has moved.
        doing: the run and the instruction, in words; "" outside of all plans.
        is_waiting: the process is in a call of a communication library.
        occasion: the run, by a name that is the same on all ranks.
        name: the communication that it posts or waits for, with its number, in words; or "".
        where: the user's line of the instruction.
        family: of the posts that the communication is numbered with; or "".
        team: the ranks of the communication.
        sequence: its number in its family and team, or 0.
        progress: by family and team.
    """

    key: Hashable = None
    doing: str = ""
    is_waiting: bool = False
    occasion: str | None = None
    name: str = ""
    where: str = ""
    family: str = ""
    team: tuple[int, ...] = ()
    sequence: int = 0
    progress: tuple[Progress, ...] = ()


class _PostPosition(NamedTuple):
    """One post of a run: its step, its number, its family and team, and both in words."""

    step: int
    number: int
    key: Key
    name: str
    where: str


def is_shared(family: str) -> bool:
    """Return whether every member makes all posts of a family, so that numbers compare."""
    return not family.endswith("transfers")


def standing(tallies: Tallies, place: ActiveStep | None) -> OwnPosition:
    """Return the position of a process in its plans; `place` None: outside of all of them."""
    tally = place.plan.tally if place is not None else None
    if place is None or tally is None:
        return OwnPosition(progress=_progress(tallies.posted_before(None), []))
    before = tallies.posted_before(tally)
    posts, current = _posts(place, before), place.current
    last_post = next((post for post in posts if post.step == current), None)
    what = f"{last_post.name} ({last_post.where})" if last_post else place.step.label
    family, team = last_post.key if last_post else ("", ())
    return OwnPosition(
        key=(tally.occasion, place.number),
        doing=f"in run {tally.runs} of @{tally.name}, at {what}",
        is_waiting=place.is_waiting,
        occasion=tally.occasion,
        name=last_post.name if last_post else "",
        where=place.step.label,
        family=family,
        team=team,
        sequence=last_post.number if last_post else 0,
        progress=_progress(before, posts, place.open),
    )


def _posts(place: ActiveStep, before: Counter[Key]) -> list[_PostPosition]:
    """Return the posts of the current run so far, in order."""
    counts, listed = before.copy(), []
    for n, step in enumerate(place.plan.steps[: place.number + 1]):
        for call in step.calls:
            key = key_of(call.kind, call.team)
            counts[key] += 1
            listed.append(
                _PostPosition(n, counts[key], key, f"{call.kind} #{counts[key]}", step.label)
            )
    return listed


def _progress(
    before: Counter[Key], posts: Sequence[_PostPosition], still: Sequence[int] = ()
) -> tuple[Progress, ...]:
    counts, last, first_open = before.copy(), dict[Key, str](), dict[Key, int]()
    for post in posts:
        counts[post.key], last[post.key] = post.number, f"{post.name} ({post.where})"
        if post.step in still:
            first_open.setdefault(post.key, post.number)
    return tuple(
        Progress(*key, posted, first_open.get(key, posted + 1) - 1, last.get(key, ""))
        for key, posted in counts.items()
    )
