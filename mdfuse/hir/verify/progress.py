"""Refuse programs of several ranks that would wait for each other forever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from mdfuse.errors import CommunicationError
from mdfuse.hir.instructions import POSTS, TRANSFERS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify.events import Event, Programs
from mdfuse.hir.verify.report import disagreement

#: Events that are one communication: of a team, or a send and its receive.
Meeting = tuple[Event, ...]
#: A communication, by its number, or the point after a wait: (rank, position).
_Node = int | tuple[int, int]


def check_progress(programs: Programs, meetings: list[Meeting]) -> None:
    """Raise CommunicationError where communications wait for each other in a cycle.

    A communication is done once all its ranks have posted it, and a rank posts only after the waits
    before that post. A send or receive outside of groups goes on alone: those before it are over,
    and those behind it begin once it is. These relations make a graph over communications and
    points of programs, which must have no cycle.

    Args:
        programs: straight-line, by rank.
        meetings: the communications, each with the event of every rank that takes part.
    """
    posted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n, events in enumerate(meetings):
        for e in events:
            posted[e.rank, e.at].append(n)
    before: dict[_Node, set[_Node]] = defaultdict(set)
    for rank, program in programs.items():
        _order_rank(before, program, rank, posted)
    _check_order(programs, meetings, before)
    if any(map(_has_ungrouped, programs.values())):
        for rank, program in programs.items():
            _order_transfers(before, program, rank, posted)
        _check_order(programs, meetings, before)


def _check_order(
    programs: Programs, meetings: list[Meeting], before: Mapping[_Node, set[_Node]]
) -> None:
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        raise _deadlock(programs, meetings, error.args[1]) from None


def _has_ungrouped(program: HostProgram) -> bool:
    """Return whether a rank sends or receives outside of groups."""
    is_grouped = False
    for i in program.instructions:
        if i.op in ("group_start", "group_end"):
            is_grouped = i.op == "group_start"
        elif i.op in TRANSFERS and not is_grouped:
            return True
    return False


def _order_rank(
    before: dict[_Node, set[_Node]],
    program: HostProgram,
    rank: int,
    posted: Mapping[tuple[int, int], list[int]],
) -> None:
    """Add a rank's edges: each post comes after the waits before it, each wait after its post."""
    point: tuple[int, int] | None = None
    under_way: dict[str, list[int]] = {}
    for at, i in enumerate(program.instructions):
        here, awaited = posted.get((rank, at), []), []
        if point is not None:
            for n in here:
                before[n].add(point)
        if i.op in POSTS:
            under_way[i.outputs[0]] = here
        elif i.op in ("wait", "barrier"):
            awaited = here if i.op == "barrier" else under_way.get(i.reads[0], [])
        if awaited:
            last, point = point, (rank, at)
            before[point].update(awaited, [last] if last is not None else [])


def _order_transfers(
    before: dict[_Node, set[_Node]],
    program: HostProgram,
    rank: int,
    posted: Mapping[tuple[int, int], list[int]],
) -> None:
    """Add the edges of a rank's sends and receives with others, of which some are in no group."""
    is_grouped = False
    alone: list[int] = []  # the last one outside of groups
    grouped: list[int] = []  # those in groups behind it
    for at, i in enumerate(program.instructions):
        if i.op in ("group_start", "group_end"):
            is_grouped = i.op == "group_start"
        elif i.op in TRANSFERS and rank not in (i.kwargs.get("to"), i.kwargs.get("from")):
            for n in posted.get((rank, at), []):
                before[n].update(alone if is_grouped else (*alone, *grouped))
                alone, grouped = (alone, [*grouped, n]) if is_grouped else ([n], [])


def _deadlock(
    programs: Programs, meetings: list[Meeting], cycle: list[_Node]
) -> CommunicationError:
    """Return the error for a cycle, with its waits and posts in order."""
    start = next(at for at, node in enumerate(cycle) if isinstance(node, int))
    cycle = [*cycle[start:-1], *cycle[: start + 1]]
    places: list[tuple[HostProgram, Instruction | None]] = []
    ranks: dict[int, None] = {}
    is_ungrouped = False
    for here, following in pairwise(cycle):
        if isinstance(here, int) and isinstance(following, tuple):
            rank, at = following
            places.append((programs[rank], programs[rank].instructions[at]))
        elif isinstance(following, int):
            is_ungrouped = is_ungrouped or isinstance(here, int)
            event = _of_both(meetings, here, following)
            rank = event.rank
            places.append(event.place)
        ranks[rank] = None
    shown = ", ".join(map(str, ranks))
    reason, hint = _UNGROUPED if is_ungrouped else _WAITING
    return disagreement(
        places,
        f"ranks {shown} wait for each other" if len(ranks) > 1 else f"rank {shown} waits forever",
        because=reason,
        hint=hint,
    )


#: Why ranks wait for each other, and what to do.
_WAITING = (
    "each waits for a communication that another posts only after its own wait",
    "post before waiting on every rank, or wait in one order on all of them",
)
_UNGROUPED = (
    "a send or receive outside of groups is over before the rank's next one begins",
    "put those that need each other between group_start and group_end",
)


def _of_both(meetings: list[Meeting], here: _Node, following: int) -> Event:
    """Return the post of a communication by the rank that comes from another node."""
    ranks = {e.rank for e in meetings[here]} if isinstance(here, int) else {here[0]}
    return next(e for e in meetings[following] if e.rank in ranks)
