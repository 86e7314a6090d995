"""The posts that a run waits for, and how long: who has them earlier, or shorter, gains no more.

work    |#####|        |####|          %b is waited for; %a kept the link busy, so it is, too
link    |  %a    | %b  |
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mdfuse.hir.instructions import POSTS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.seeing.events import Event
from mdfuse.seeing.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Hold:
    """A time in which a rank waits.

    Attributes:
        rank: the first one of ranks that run alike.
        seconds: how long.
        posts: of the communication that it waits for, on all ranks, and of those that kept the
            links of that one busy.
    """

    rank: int
    seconds: float
    posts: tuple[Instruction, ...]


def waited_for(timeline: Timeline) -> list[Hold]:
    """Return the times in which ranks wait, also at the end of a run, in any order."""
    links, posts = _links(timeline), _posts(timeline)
    before = _before(links)
    return [
        Hold(rank, ns / 1e9, tuple(i for f in _chain(flow, before) for i in posts.get(f, ())))
        for rank, ns, flow in _waits(timeline, links)
    ]


def slack(
    timeline: Timeline, program: HostProgram, since: Mapping[str, int]
) -> Mapping[str, float]:
    """Return handle of a post -> the seconds by which a rank could make it earlier, at most.

    Args:
        timeline: of the program.
        program: for all ranks.
        since: handle -> the first instruction, outside of loops, before which it may stand.
    """
    earlier = defaultdict[str, float](float)
    for code in timeline.programs:
        places, posted = _places(program, code), dict[str, int]()
        #: instruction -> when the rank comes to it, or to one behind it
        starts = [math.inf] * (len(program.instructions) + 1)
        for e in timeline.events:
            if e.rank == code.rank and e.part != "transfer":
                starts[places[e.instruction]] = min(starts[places[e.instruction]], e.start_ns)
            if e.rank == code.rank and e.part == "post":
                posted.update(dict.fromkeys(code.instructions[e.instruction].outputs, e.start_ns))
        starts = [*itertools.accumulate(reversed(starts), min)][::-1]
        for handle in posted.keys() & since.keys():
            ns = posted[handle] - starts[since[handle]]
            earlier[handle] = max(earlier[handle], ns / 1e9)
    return earlier


def _places(program: HostProgram, code: HostProgram) -> list[int]:
    """Return for each instruction of a rank that of the program, outside of loops, it is from."""
    known = defaultdict[tuple[bool, str], list[int]](list)
    for n, i in enumerate(program.instructions):
        for key in {key for j in i.walk() for key in _keys(j)}:
            known[key].append(n)
    at, places = 0, list[int]()
    for i in code.instructions:
        at = next((n for key in _keys(i) for n in known[key] if n >= at), at)
        places.append(at)
    return places


def _keys(i: Instruction) -> Iterator[tuple[bool, str]]:
    """Yield whether an instruction waits, with each name that it waits for, or binds."""
    is_wait = i.op == "wait"
    return ((is_wait, x.partition("@")[0]) for x in (i.reads if is_wait else i.outputs))


def _waits(
    timeline: Timeline, links: Mapping[tuple[int, str], list[Event]]
) -> Iterator[tuple[int, int, int]]:
    """Yield rank, nanoseconds and flow of each wait, and of what nobody waits for at the end."""
    ends = defaultdict[int, int](int)
    for e in timeline.events:
        if e.part in ("work", "wait"):
            ends[e.rank] = max(e.stop_ns, ends[e.rank])
        if e.part == "wait" and e.flow is not None and e.stop_ns > e.start_ns:
            yield e.rank, e.stop_ns - e.start_ns, e.flow
    for (rank, _), row in links.items():
        for e in row:
            if e.flow is not None and e.stop_ns > ends[rank]:
                yield rank, e.stop_ns - max(e.start_ns, ends[rank]), e.flow


def _chain(flow: int, before: Mapping[int, list[int]]) -> dict[int, None]:
    """Return a flow, and those without which it would have begun earlier."""
    chain, waiting = dict[int, None](), [flow]
    while waiting:
        flow = waiting.pop()
        if flow not in chain:
            chain[flow] = None
            waiting += before.get(flow, ())
    return chain


def _posts(timeline: Timeline) -> Mapping[int, list[Instruction]]:
    """Return flow -> its posts on all ranks."""
    posts: dict[int, list[Instruction]] = defaultdict(list)
    programs = {p.rank: p.instructions for p in timeline.programs}
    for e in timeline.events:
        if e.part == "post" and e.flow is not None:
            i = programs[e.rank][e.instruction]
            posts[e.flow] += [i] if i.op in POSTS else []
    return posts


def _links(timeline: Timeline) -> Mapping[tuple[int, str], list[Event]]:
    """Return the transfers on each link of each rank, in order."""
    links: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for e in timeline.events:
        if e.part == "transfer":
            links[e.rank, e.lane].append(e)
    return links


def _before(links: Mapping[tuple[int, str], list[Event]]) -> Mapping[int, list[int]]:
    """Return flow -> the flows that end where it begins, on one of its links."""
    before: dict[int, list[int]] = defaultdict(list)
    for row in links.values():
        for one, other in itertools.pairwise(row):
            is_next = other.start_ns <= one.stop_ns + 1  # both are rounded
            if is_next and one.flow is not None and other.flow is not None:
                before[other.flow].append(one.flow)
    return before
