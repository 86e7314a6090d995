"""Check across ranks that the members of each team post the same, in the same order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

from mdfuse.errors import CommunicationError
from mdfuse.hir.verify.deadlocks import Meeting, check_progress
from mdfuse.hir.verify.error_report import disagreement
from mdfuse.hir.verify.point_to_point import match_transfers
from mdfuse.hir.verify.post_events import PostEvent, Programs, difference, events
from mdfuse.hir.verify.replica_consistency import check_alike
from mdfuse.layouts.kinds import POINT_TO_POINT, blocks_of

Team = tuple[int, ...]

_SAME = "all ranks of a team post the same communications in the same order, with equal kind, "
_SAME += "size, dtype, reduce op and root"


def check_teams(programs: Programs, along: Set[str] | None = None) -> None:
    """Raise CommunicationError where communications of several ranks do not fit together.

    Args:
        programs: straight-line, by rank.
        along: None if the programs are those of all ranks. Otherwise they are those of one team,
            whose transfers alone are compared: the handles of transfers along its axis.
    """
    begun = {rank: list(events(program)) for rank, program in programs.items()}
    meetings: list[Meeting] = []
    if along is None:
        meetings += _match_collectives(programs, begun)
    meetings += match_transfers(programs, begun, along)
    check_progress(programs, meetings)
    if along is None:
        check_alike(programs)


def _match_collectives(
    programs: Programs, begun: Mapping[int, list[PostEvent]]
) -> Iterator[Meeting]:
    """Yield the n-th post of each team, from all its ranks, once they agree on it."""
    posted: dict[Team, dict[int, list[PostEvent]]] = defaultdict(lambda: defaultdict(list))
    for rank, some in begun.items():
        for event in some:
            if event.call.kind not in POINT_TO_POINT:
                posted[event.call.team][rank].append(event)
    for team, by_rank in posted.items():
        for n in range(max(map(len, by_rank.values()))):
            meeting = {r: by_rank[r][n] for r in team if n < len(by_rank[r])}
            first = next(iter(meeting.values()))
            for rank in team:
                if rank not in meeting:
                    raise _never_posts(programs, rank, n, by_rank[rank], first, begun)
                _check_agree(n, first, meeting[rank])
            _check_blocks(n, tuple(meeting.values()))
            yield tuple(meeting.values())


def _team_text(team: Team) -> str:
    shown = " ".join(map(str, team[:16]))
    return f"team ({shown} …)" if len(team) > 16 else f"team ({shown})"


def _never_posts(
    programs: Programs,
    rank: int,
    n: int,
    before: list[PostEvent],
    first: PostEvent,
    begun: Mapping[int, list[PostEvent]],
) -> CommunicationError:
    """Return the error for a member of a team that lacks a post, with what it posts instead."""
    what = f"{_team_text(first.call.team)}, communication {n}: rank {rank} never posts "
    what += f"{first.name}, which rank {first.rank} does"
    if rank not in programs:
        return disagreement([first.place], f"{what}: it has no program", because=_SAME)
    mine = begun[rank]
    later = mine[mine.index(before[-1]) + 1 :] if before else mine
    same = [e for e in mine if e.handle and e.handle == first.handle]
    instead = (same or later)[:1]
    with_team = [f" with {_team_text(e.call.team)}" for e in instead]
    what += f"; instead it posts {instead[0].name}{with_team[0]}" if instead else ""
    nothing = [(programs[rank], None)] if not instead else []
    return disagreement(
        [first.place, *(e.place for e in instead), *nothing],
        what,
        because=_SAME,
        hint="post it on every rank of the team, at the same place in the order",
    )


def _check_agree(n: int, a: PostEvent, b: PostEvent) -> None:
    """Raise CommunicationError where the n-th posts of two members of a team differ."""
    problem = difference(a, b)
    if problem is not None:
        what, mine, theirs = problem
        posts = f"posts {what} {mine}" if what else f"posts {mine}"
        raise disagreement(
            [a.place, b.place],
            f"{_team_text(a.call.team)}, communication {n}: rank {a.rank} {posts}, "
            f"rank {b.rank} posts {theirs}",
            because=_SAME,
            hint="a communication that only some ranks should run belongs on a mesh of these ranks",
        )


def _check_blocks(n: int, meeting: tuple[PostEvent, ...]) -> None:
    """Raise CommunicationError where the members of a team post blocks of different sizes.

    Args:
        n: the number of the communication among those of its team.
        here: its event on each rank, in the order of the team.
    """
    if meeting[0].call.kind == "AllToAll":
        _check_all_to_all(n, meeting)
        return
    blocks = [(size, event) for event in meeting for size in _blocks(event)]
    for size, event in blocks:
        if size != blocks[0][0]:
            _refuse_sizes(n, blocks[0][1], event, blocks[0][0], size)


def _blocks(event: PostEvent) -> Iterator[float]:
    """Yield the elements of a block, by each buffer of a post; a fraction if they do not divide."""
    for count, multiple in zip(event.counts, blocks_of(event.call), strict=True):
        if count is not None and multiple:
            yield count // multiple if count % multiple == 0 else count / multiple


def _check_all_to_all(n: int, meeting: tuple[PostEvent, ...]) -> None:
    """Raise CommunicationError where a rank sends more or less than another one receives."""
    for x, a in enumerate(meeting):
        for y, b in enumerate(meeting):
            sent, received = a.call.send_counts[y], b.call.recv_counts[x]
            if sent != received:
                _refuse_sizes(n, a, b, sent, received)


def _refuse_sizes(n: int, a: PostEvent, b: PostEvent, mine: float, theirs: float) -> None:
    raise disagreement(
        [a.place, b.place],
        f"{_team_text(a.call.team)}, communication {n}: blocks of {mine:g} elements on rank "
        f"{a.rank}, of {theirs:g} on rank {b.rank}",
        because=_SAME,
        hint="pad the buffers where the parts of the ranks differ",
    )
