"""The calls of a pipeline in one order for all ranks, by its schedule.

    0F0 0F1 0B0 0B1            F0(0) T01(0) F0(1) T01(1) F1(0) B1(0) T10(0) …
    1F0 1B0 1F1 1B1     ->

A hand-over comes right behind the call that makes its value: so the next microbatch is on its way
before the work on this one begins. Stages on shared ranks send nothing: there a later stage begins
before an earlier one goes on, so that it waits for its own operands only.

Two actions that overlap are two lists beside each other, whose blocks are taken in turns, a piece
at a time (`hir/emit/stage_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from mdfuse.pipelines.actions import Action
from mdfuse.pipelines.schedules import Schedule
from mdfuse.pipelines.stages import Part, Stages

#: A part, and the microbatch that it runs for.
Call = tuple[Part, int]
#: Lists of calls that are taken in turns; nearly always one.
Lanes = tuple[tuple[Call, ...], ...]


def calls(stages: Stages, schedule: Schedule) -> Iterator[Lanes]:
    """Yield the calls of all ranks in their order.

    Args:
        stages: whose backwards are whole, or in two parts, as the schedule has them.
        schedule: a schedule for these stages.

    Raises:
        LoweringError: parts of the stages need each other.
    """
    done: set[Call] = set()
    pairs = {unit[0]: unit for row in schedule.units for unit in row}
    for _, first in schedule.merged(reads=stages.reads, late_first=stages.shares_ranks):
        if first not in pairs:
            continue  # it overlaps with one that came before
        unit = pairs[first]
        yield from _alone(_ahead(stages, unit, done))
        yield tuple(tuple(_work(stages, action, done)) for action in unit)
    yield from _alone(_left(stages, schedule.microbatches, done))


def _left(stages: Stages, microbatches: int, done: set[Call]) -> Iterator[Call]:
    """Yield the hand-overs that no action needs: of inputs, to outputs."""
    for k in range(microbatches):
        for part in nx.topological_sort(stages.graph):
            if part.phase == "T" and (part, k) not in done:
                done.add((part, k))
                yield part, k


def _alone(calls: Iterator[Call]) -> Iterator[Lanes]:
    return (((call,),) for call in calls)


def _ahead(stages: Stages, unit: tuple[Action, ...], done: set[Call]) -> Iterator[Call]:
    """Yield the hand-overs that actions need and no call has made: those of inputs."""
    for action in unit:
        for part in _parts(stages, action):
            yield from _handed(stages, (part, action.microbatch), done)


def _handed(stages: Stages, call: Call, done: set[Call]) -> Iterator[Call]:
    """Yield the hand-overs that a call needs, and those that they need."""
    part, k = call
    for ahead in sorted(stages.graph.predecessors(part)):
        if ahead.phase == "T" and (ahead, k) not in done:
            yield from _handed(stages, (ahead, k), done)
            done.add((ahead, k))
            yield ahead, k


def _work(stages: Stages, action: Action, done: set[Call]) -> Iterator[Call]:
    """Yield the calls of an action, with the hand-overs of its results."""
    for part in _parts(stages, action):
        yield from _run(stages, (part, action.microbatch), done)


def _run(stages: Stages, call: Call, done: set[Call]) -> Iterator[Call]:
    """Yield a call, and the hand-overs of all values that exist now."""
    part, k = call
    done.add(call)
    yield call
    for after in sorted(stages.graph.successors(part)):
        if after.phase == "T" and all((p, k) in done for p in stages.graph.predecessors(after)):
            yield from _run(stages, (after, k), done)


def _parts(stages: Stages, action: Action) -> list[Part]:
    """Return the parts of an action: none where a stage has no such part."""
    whole = Part(action.stage, action.phase)
    split = [Part(action.stage, phase) for phase in "IW"] if action.phase == "B" else []
    return [part for part in (whole, *split) if part in stages.graph]
