"""The report of a communication that broke or hangs: the positions of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mdfuse.errors import BackendError
from mdfuse.runtime.watch.positions import OwnPosition, Position, Progress, is_shared

if TYPE_CHECKING:
    from mdfuse.runtime.watch.post_ring import Post
    from mdfuse.runtime.watch.reports import Page

#: How many of the last posts a report lists.
_LAST = 8

#: How many ranks a report lists one by one.
_RANKS = 16

#: The verdict on a rank that left no message in a store that answers.
NEVER_TOLD = "no answer: the process ended, or is stuck where no thread of Python can run"

#: The reason why a wait does not end, for a communication, and for a meeting of all ranks.
_IN_ORDER = "all members of a team post the same, in one order"
_TOGETHER = "no rank goes on before all have come"

#: A part of the last message of a rank that left because its own communication broke.
_VICTIM = "BackendError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """The reason for a report.

    Attributes:
        team: the ranks that the communication concerns.
        what: the fact.
        details: the line of the program, the bytes, the age; or "".
        name: the communication, with its number and line, in words; or "".
        family: of the posts that the communication is numbered with; or "".
        sequence: its number in its family and team, or 0.
    """

    team: tuple[int, ...]
    what: str
    details: str = ""
    name: str = ""
    family: str = ""
    sequence: int = 0

    @classmethod
    def of(cls, post: Post, rank: int, timeout_s: float, age_s: float) -> Alarm:
        """Return the alarm over a post that is not done."""
        subject = post.subject
        name = f"{subject.kind} #{post.sequence} on team {_team_text(subject.team)}"
        age = f"posted {age_s:.1f} s ago (timeout_s={timeout_s:g})"
        return cls(
            team=subject.team,
            what=f"{name} is not done on rank {rank}",
            details=f"{subject.where}   {bytes_text(subject.bytes)}, {age}",
            name=post.text(),
            family=subject.family,
            sequence=post.sequence,
        )

    @classmethod
    def at(
        cls, now: OwnPosition, what: str, everybody: tuple[int, ...], details: str = ""
    ) -> Alarm:
        """Return the alarm over the wait of a plan, or over a wait outside of all plans.

        Args:
            now: the position of this process in its plans.
            what: the fact.
            everybody: the ranks concerned where no plan is running.
            details: the line of the program; or "".
        """
        return cls(
            team=now.team or everybody,
            what=what,
            details=details,
            name=f"{now.name} ({now.where})" if now.name else "",
            family=now.family,
            sequence=now.sequence,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The facts that a report shows.

    Attributes:
        position: this rank's position.
        others: the positions of other ranks, as far as the store answers.
        ranks: the ranks whose positions are told.
        posts: the last posts of this rank outside torch.distributed.
        store: the fault of the store, or "".
        heard: the message of the first rank to raise an alarm, if it is another one; or "".
        lost: the rank whose end took the store with it, or None.
        page: the file that the report is kept in, or None.
        missing: ranks that should have been heard of, and were not, with a text on each.
    """

    position: Position
    others: Mapping[int, Position]
    ranks: Sequence[int]
    posts: Sequence[Post] = ()
    store: str = ""
    heard: str = ""
    lost: int | None = None
    page: Page | None = None
    missing: Mapping[int, str] = field(default_factory=dict)


#: The consequences of an alarm.
ENDS = "this process ends now"
RAISED = "results that its device had not computed by then are worthless"

#: The remedy where the program goes on.
_REBUILD = "mdfuse.rebuild(error) goes on with the ranks that are left; "


class Interrupting(Protocol):
    """A way to raise an error in the program; see `mdfuse.runtime.interruption`.

    Attributes:
        is_over: the program has an error.
    """

    is_over: bool

    def can_begin(self) -> bool:
        """Return whether the program can have an error."""

    def begin(self, error: BackendError) -> bool:
        """Raise an error in the program; return whether the program has it."""

    def stand_by(self) -> None:
        """Let no run begin, and note whole versions; the second call tells others."""


def report(alarm: Alarm, table: Table, consequence: str = ENDS) -> BackendError:
    """Return the error that the watchdog reports, or lets the program raise."""
    return BackendError(
        alarm.what,
        where=[alarm.details, *_rows(alarm, table)],
        because=f"{_IN_ORDER if alarm.name else _TOGETHER}; {consequence}",
        hint=f"{_REBUILD if consequence == RAISED else ''}{_hint(alarm, table)}",
        follows=_follows(alarm, table),
    )


def explained(error: BackendError, alarm: Alarm, table: Table) -> BackendError:
    """Return an error of a backend, extended by the positions of all ranks."""
    new = BackendError(
        error.what,
        where=[*error.where, alarm.details, *_rows(alarm, table)],
        because=error.because,
        hint=_hint(alarm, table),
        follows=_follows(alarm, table),
    )
    for note in getattr(error, "__notes__", ()):
        new.add_note(note)
    return new


def blame(alarm: Alarm, table: Table) -> str:
    """Return, in one line, the ranks that went wrong first, and their faults."""
    ranks, why, _ = _suspects(alarm, table)
    return f"{ranks_text(ranks)}: {why}" if ranks else "nobody knows why"


def _follows(alarm: Alarm, table: Table) -> bool:
    """True if the ranks that went wrong first left a message, so that their launcher shows them.

    A rank that lives, or is silent, appears in the report only.
    """
    ranks, *_ = _suspects(alarm, table)
    return bool(ranks) and all(r in table.others and table.others[r].ended for r in ranks)


def _rows(alarm: Alarm, table: Table) -> list[str]:
    position = table.position
    at = f"{position.doing}; " if position.doing else ""
    rows = [f"rank {position.rank}: {at}its host is at {position.host or 'no line of Python'}"]
    rows += [f"posted {_count_text(p)}" for p in position.progress if position.doing]
    rows += _ranks(alarm, table)
    rows += [table.store] if table.store else []
    rows += [f"before, {table.heard}"] if table.heard else []
    rows += _last(table.posts)
    return rows + ([table.page.row] if table.page and table.page.row else [])


def _count_text(progress: Progress) -> str:
    last = f", the last one {progress.last}" if progress.last else ""
    return f"{progress.posted} {progress.family} on team {_team_text(progress.team)}{last}"


def _ranks(alarm: Alarm, table: Table) -> list[str]:
    """Return the positions of the other ranks, one line for all ranks at the same one."""
    said: dict[str, list[int]] = {}
    for rank in table.ranks:
        if rank in table.missing:
            said.setdefault(table.missing[rank], []).append(rank)
        elif rank != table.position.rank and (rank in table.others or not table.store):
            said.setdefault(_verdict(alarm, table.others.get(rank), rank), []).append(rank)
    return [f"{ranks_text(ranks)} {text}" for text, ranks in said.items()]


def _verdict(alarm: Alarm, at: Position | None, rank: int) -> str:
    if at is None:
        return NEVER_TOLD
    host = f"; its host is at {at.host}" if at.host else ""
    if at.ended:
        return at.ended + (f", after {at.doing}" if _is_astray(alarm, rank, at) else "")
    if at.silent_s:
        last = at.doing or at.host or "nowhere"
        return f"no sign of life for {at.silent_s:.1f} s; last seen {last}"
    if rank not in alarm.team or not alarm.sequence:
        return f"answers: {at.doing}{host}" if at.doing else f"answers{host}"
    progress = at.of(alarm.family, alarm.team)
    if not is_shared(alarm.family):
        counts = f"{progress.posted} {progress.family}, {progress.done} of them done"
        return f"posted {counts}, last {progress.last or 'none'}{host}"
    if progress.posted < alarm.sequence:
        last = progress.last or (f"#{progress.posted}" if progress.posted else "nothing there")
        doing = f", {at.doing}" if at.doing and not progress.last else ""
        return f"has not posted it: it is at {last}{doing}{host}"
    if progress.posted == alarm.sequence and progress.last not in ("", alarm.name):
        return f"posted another one in its place: {at.doing or progress.last}"
    if progress.done >= alarm.sequence:
        return f"is done with it{host}"
    return "has posted it, and waits too"


def _hint(alarm: Alarm, table: Table) -> str:
    ranks, _, hint = _suspects(alarm, table)
    return hint.format(ranks_text(ranks))


_SLOW = "; where it is only slow, raise timeout_s"


def _suspects(alarm: Alarm, table: Table) -> tuple[list[int], str, str]:
    """Return the ranks that probably went wrong first, their fault, and the remedy.

    The tests go from the strongest evidence to the weakest; the first that finds ranks decides.
    """
    others = {rank: at for rank, at in table.others.items() if rank in table.ranks}
    left = [rank for rank, at in others.items() if at.ended]
    present = {rank: at for rank, at in others.items() if rank not in left}
    see = "see the log of {0}: "
    tests = (
        ([r for r, at in others.items() if at.silent_s], "no sign of life", see + "it died, or "
         "stopped, or its host is cut off"),
        (list(table.missing), "missing", see + "it died, or stopped, or never came"),
        ([r for r in left if _VICTIM not in others[r].ended], "left", see + "it left the others"),
        ([r for r, at in present.items() if _is_behind(alarm, r, at)], "did not post it",
         "see what {0} did instead" + _SLOW),
        (_astray(alarm, table), "posted another one",
         "compare what {0} ran with the others: all ranks run the same programs in one order"),
        (left, "left", see + "it left the others"),
        ([] if table.lost is None else [table.lost], "took the store with it", see + "it died, or "
         "stopped, and with it the store"),
    )  # fmt: skip
    suspects = ((sorted(ranks), why, hint) for ranks, why, hint in tests if ranks)
    return next(
        suspects, ([], "", "see the log of each rank; where they are only slow, raise timeout_s")
    )


def _is_behind(alarm: Alarm, rank: int, at: Position) -> bool:
    if not alarm.sequence or rank not in alarm.team or not is_shared(alarm.family):
        return False
    return at.of(alarm.family, alarm.team).posted < alarm.sequence


def _astray(alarm: Alarm, table: Table) -> list[int]:
    """Return the ranks whose post differs from that of most of the team."""
    others = [rank for rank, at in table.others.items() if _is_astray(alarm, rank, at)]
    return [table.position.rank] if 2 * len(others) > len(alarm.team) else others


def _is_astray(alarm: Alarm, rank: int, at: Position) -> bool:
    if not alarm.sequence or rank not in alarm.team or not is_shared(alarm.family):
        return False
    progress = at.of(alarm.family, alarm.team)
    return progress.posted == alarm.sequence and progress.last not in ("", alarm.name)


def _last(posts: Sequence[Post]) -> list[str]:
    lines = []
    for post in posts[-_LAST:]:
        state = "done" if post.is_done() else "not done"
        team = _team_text(post.subject.team)
        lines.append(f"posted {post.text()} on team {team}, {state}")
    return lines


def _team_text(team: Sequence[int]) -> str:
    if len(team) <= _RANKS:
        return str(tuple(team))
    return f"({', '.join(map(str, team[:3]))}, ... {team[-1]}: {len(team)} ranks)"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as reports name them: "rank 3", "ranks 0, 1"."""
    ranks = list(ranks)
    text = ", ".join(map(str, ranks[:_RANKS]))
    others = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{others}"


def bytes_text(count: int) -> str:
    """Return a number of bytes as reports write it, such as "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}" if unit == "bytes" else f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"
