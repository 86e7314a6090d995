"""Merge the rows of a schedule into one sequence of calls for all ranks.

    m0   F0(0) F0(1) B0(0) B0(1)          F0(0) T01(0) F0(1) T01(1) F1(0) B1(0) T10(0) …
    m1   F1(0) B1(0) F1(1) B1(1)    ->

Each row keeps its order. Among rows, calls come by the time at which they start where each takes as
long as any other, the earlier stage first; a hand-over comes right behind the call that makes what
it hands over. So the next microbatch is received before the work on this one begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import networkx as nx

from mdfuse.errors import LoweringError
from mdfuse.passes.stages import Part, Stages


class Action(Protocol):
    """What a rank group does next: a phase (F, B, I, W) of a stage, for a microbatch."""

    @property
    def stage(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def microbatch(self) -> int: ...


Rows = Sequence[Sequence[Action]]
#: A part, and the microbatch that it runs for.
Call = tuple[Part, int]


def splits(rows: Rows) -> bool:
    """Return whether a schedule takes the gradients of weights by themselves."""
    return any(action.phase in "IW" for row in rows for action in row)


def check_rows(rows: Rows, stages: Stages, count: int) -> None:
    """Raise LoweringError where a schedule is not one of these stages and microbatches."""
    name, groups = stages.fusion.name, stages.groups
    if len(rows) != max(groups) + 1:
        because = f"@{name} has stages on {max(groups) + 1} meshes"
        raise _refused(name, f"{len(rows)} rows", because, "a row for each mesh, in their order")
    for n, row in enumerate(rows):
        for a in row:
            if not 0 <= a.stage < len(groups) or groups[a.stage] != n:
                home = [s for s, group in enumerate(groups) if group == n]
                because = f"mesh {n} has the stages {', '.join(map(str, home))}"
                hint = "set values on the meshes in the order in which the schedule visits them"
                raise _refused(name, f"{_text(a)} in row {n}", because, hint)
    phases = {a.phase for row in rows for a in row}
    if stages.has_backward == phases.isdisjoint("BIW"):
        has = "computes gradients" if stages.has_backward else "computes no gradients"
        what = "without" if stages.has_backward else "with"
        hint = 'another schedule: "forward" is the one without gradients'
        raise _refused(name, f"a schedule {what} a backward", f"@{name} {has}", hint)
    done = [_steps(a) for row in rows for a in row]
    seen: set[Call] = set()
    for call in (call for calls in done for call in calls):
        if call in seen:
            raise _refused(name, f"{_call(call)} twice", "each runs once", "leave one of them out")
        seen.add(call)
    phases = {"F", "I", "W"} if stages.has_backward else {"F"}
    wanted = {(Part(s, p), k) for s in range(len(groups)) for p in phases for k in range(count)}
    if seen != wanted:
        lacking, more = min(wanted - seen, default=None), min(seen - wanted, default=None)
        what = f"no {_call(lacking)}" if lacking is not None else _call(more)  # type: ignore[arg-type]
        because = f"there are {len(groups)} stages and {count} microbatches"
        raise _refused(name, what, because, "a schedule for as many")


def calls(rows: Rows, stages: Stages, count: int) -> list[Call]:
    """Return the calls of all ranks in their order.

    Args:
        rows: of actions, one row per rank group, after `check_rows`.
        stages: whose parts are as the schedule has them, B by itself or in I and W.
        count: of microbatches.

    Raises:
        LoweringError: an action comes before one that it needs.
    """
    graph = stages.graph
    ready: dict[Call, int] = {}  # when what a call makes is there
    found: list[tuple[int, int, int, list[Call]]] = []
    left = [deque(_parts(row, graph)) for row in rows]
    free = [0] * len(rows)
    lone = [p for p in graph if p.phase == "T" and not any(graph.predecessors(p))]
    for part, k in ((p, k) for p in lone for k in range(count)):
        ready[part, k] = k
        found.append((k, -1, len(found), [(part, k)]))
    while any(left):
        before = len(found)
        for n, row in enumerate(left):
            while row and all((p, row[0][1]) in ready for p in graph.predecessors(row[0][0])):
                part, k = row.popleft()
                begin = max([free[n], *(ready[p, k] for p in graph.predecessors(part))])
                free[n] = ready[part, k] = begin + 1
                sent = [(t, k) for t in _sent(graph, part, k, ready)]
                found.append((begin, part.stage, len(found), [(part, k), *sent]))
        if len(found) == before:
            raise _stuck(stages, [row[0] for row in left if row], ready)
    return [call for *_, made in sorted(found, key=lambda x: x[:3]) for call in made]


def _parts(row: Iterable[Action], graph: nx.DiGraph[Part]) -> Iterator[Call]:
    """Yield the calls of a row, without parts that have nothing to do."""
    for a in row:
        whole = Part(a.stage, a.phase)
        for call in [(whole, a.microbatch)] if whole in graph else _steps(a):
            if call[0] in graph:
                yield call


def _steps(a: Action) -> list[Call]:
    """Return what an action does, the gradients of weights by themselves."""
    phases = "IW" if a.phase == "B" else a.phase
    return [(Part(a.stage, phase), a.microbatch) for phase in phases]


def _sent(graph: nx.DiGraph[Part], part: Part, k: int, ready: dict[Call, int]) -> Iterator[Part]:
    """Yield the hand-overs that a call completes, those that hand on what these bring included.

    They are ready when the call is.
    """
    for t in sorted(graph.successors(part)):
        if t.phase == "T" and all((p, k) in ready for p in graph.predecessors(t)):
            ready[t, k] = ready[part, k]
            yield t
            yield from _sent(graph, t, k, ready)


def _stuck(stages: Stages, heads: list[Call], ready: dict[Call, int]) -> LoweringError:
    waits = []
    for part, k in heads:
        lacking = [p for p in stages.graph.predecessors(part) if (p, k) not in ready]
        waits.append(f"{part}({k}) waits for {', '.join(f'{p}({k})' for p in sorted(lacking))}")
    return _refused(
        stages.fusion.name,
        "rows that wait for each other",
        "; ".join(waits),
        "an action stands behind those whose results it takes",
    )


def _text(a: Action) -> str:
    return f"{a.phase}{a.stage}({a.microbatch})"


def _call(call: Call) -> str:
    return f"{call[0]}({call[1]})"


def _refused(name: str, what: str, because: str, hint: str) -> LoweringError:
    what = f"schedule of @{name}: {what}"
    return LoweringError(what, where=f"fusion @{name}", because=because, hint=hint)
