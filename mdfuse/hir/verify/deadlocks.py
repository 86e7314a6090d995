"""Refuse programs of several ranks that would wait for each other forever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from mdfuse.errors import CommunicationError
from mdfuse.hir.instructions import POSTS, TRANSFERS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify.error_report import disagreement
from mdfuse.hir.verify.post_events import PostEvent, Programs

#: Events that are one communication: of a team, or a send and its receive.
Meeting = tuple[PostEvent, ...]
#: A communication, by its number, or the point after a wait: (rank, position).
_Node = int | tuple[int, int]
#: (rank, position) of a post -> the numbers of its communications.
_Posted = Mapping[tuple[int, int], list[int]]
#: Adds edges of a rank to those that come before each node.
_Order = Callable[[dict[_Node, set[_Node]], HostProgram, int, _Posted], None]


def check_progress(programs: Programs, meetings: list[Meeting]) -> None:
    """Raise CommunicationError where communications wait for each other in a cycle.

    A communication ends after all its ranks have posted it, and a rank posts only after its earlier
    waits. Sends and receives of one group proceed together; a transfer outside of groups proceeds
    alone. A group begins after the one before has ended. These relations are the edges of a graph
    over communications and points of programs, which must have no cycle.

    Args:
        programs: straight-line, by rank.
        meetings: the communications, each with the event of every rank that takes part.
    """
    posted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n, events in enumerate(meetings):
        for e in events:
            posted[e.rank, e.at].append(n)
    cycle = _cycle(programs, posted, _order_rank, _order_transfers)
    if cycle:
        cycle = _cycle(programs, posted, _order_rank) or cycle  # the plainer reason
        raise _deadlock(programs, meetings, cycle)


def _cycle(programs: Programs, posted: _Posted, *orders: _Order) -> list[_Node]:
    """Return nodes that come before each other, as these functions order them; else none."""
    before: dict[_Node, set[_Node]] = defaultdict(set)
    for rank, program in programs.items():
        for order in orders:
            order(before, program, rank, posted)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        nodes: list[_Node] = error.args[1]
        return nodes
    return []


def _order_rank(
    before: dict[_Node, set[_Node]],
    program: HostProgram,
    rank: int,
    posted: _Posted,
) -> None:
    """Add a rank's edges: each post comes after the waits before it, each wait after its post."""
    point: tuple[int, int] | None = None
    under_way: dict[str, list[int]] = {}
    for at, i in enumerate(program.instructions):
        posts, awaited = posted.get((rank, at), []), []
        if point is not None:
            for n in posts:
                before[n].add(point)
        if i.op in POSTS:
            under_way[i.outputs[0]] = posts
        elif i.op in ("wait", "barrier"):
            awaited = posts if i.op == "barrier" else under_way.get(i.reads[0], [])
        if awaited:
            last, point = point, (rank, at)
            before[point].update(awaited, [last] if last is not None else [])


def _order_transfers(
    before: dict[_Node, set[_Node]],
    program: HostProgram,
    rank: int,
    posted: _Posted,
) -> None:
    """Add the edges of a rank's sends and receives with others."""
    is_grouped = False
    over: list[int] = []  # the transfers of the last group, or the last one outside of groups
    at_once: list[int] = []  # the transfers of this group so far
    for at, i in enumerate(program.instructions):
        if i.op in ("group_start", "group_end"):
            is_grouped = i.op == "group_start"
            over, at_once = at_once or over, []
        elif i.op in TRANSFERS and rank not in (i.kwargs.get("to"), i.kwargs.get("from")):
            transfers = posted.get((rank, at), [])
            for n in transfers:
                before[n].update(over)
            if is_grouped:
                at_once += transfers
            else:
                over = transfers or over


def _deadlock(
    programs: Programs, meetings: list[Meeting], cycle: list[_Node]
) -> CommunicationError:
    """Return the error for a cycle, with its waits and posts in order."""
    start = next(at for at, node in enumerate(cycle) if isinstance(node, int))
    cycle = [*cycle[start:-1], *cycle[: start + 1]]
    places: list[tuple[HostProgram, Instruction | None]] = []
    ranks: dict[int, None] = {}
    is_apart = False
    for earlier, following in pairwise(cycle):
        if isinstance(earlier, int) and isinstance(following, tuple):
            rank, at = following
            places.append((programs[rank], programs[rank].instructions[at]))
        elif isinstance(following, int):
            is_apart = is_apart or isinstance(earlier, int)
            event = _of_both(meetings, earlier, following)
            rank = event.rank
            places.append(event.place)
        ranks[rank] = None
    shown = ", ".join(map(str, ranks))
    reason, hint = _APART if is_apart else _WAITING
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
_APART = (
    "a group, or a send or receive outside of groups, is over before the rank's next one begins",
    "put those that need each other between one group_start and its group_end",
)


def _of_both(meetings: list[Meeting], node: _Node, following: int) -> PostEvent:
    """Return the post of a communication by the rank that comes from another node."""
    ranks = {e.rank for e in meetings[node]} if isinstance(node, int) else {node[0]}
    return next(e for e in meetings[following] if e.rank in ranks)
