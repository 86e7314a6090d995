"""The calls of a pipeline in one order for all ranks, by its schedule.

    0F0 0F1 0B0 0B1            F0(0) T01(0) F0(1) T01(1) F1(0) B1(0) T10(0) …
    1F0 1B0 1F1 1B1     ->

A hand-over comes right behind the call that makes what it hands over: so the next microbatch is on
its way before the work on this one begins. Where stages share ranks there is no way: there a later
stage begins before an earlier one goes on, so that it waits for no more than what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from mdfuse.pipelines.actions import Action
from mdfuse.pipelines.schedules import Schedule
from mdfuse.pipelines.stages import Part, Stages

#: A part, and the microbatch that it runs for.
Call = tuple[Part, int]


def calls(stages: Stages, schedule: Schedule) -> Iterator[Call]:
    """Yield the calls of all ranks in their order.

    Args:
        stages: whose backwards are whole, or in two parts, as the schedule has them.
        schedule: one for these stages.

    Raises:
        LoweringError: parts of the stages need each other.
    """
    done: set[Call] = set()
    for _, action in schedule.merged(reads=stages.reads, late_first=stages.shares_ranks):
        for part in _parts(stages, action):
            ahead = (p for p in sorted(stages.graph.predecessors(part)) if p.phase == "T")
            for call in ((p, action.microbatch) for p in ahead):
                if call not in done:  # what is handed over is an input, which is there
                    done.add(call)
                    yield call
            yield from _run(stages, (part, action.microbatch), done)


def _run(stages: Stages, call: Call, done: set[Call]) -> Iterator[Call]:
    """Yield a call, and the hand-overs of all that is there now."""
    part, k = call
    done.add(call)
    yield call
    for after in sorted(stages.graph.successors(part)):
        if after.phase == "T" and all((p, k) in done for p in stages.graph.predecessors(after)):
            yield from _run(stages, (after, k), done)


def _parts(stages: Stages, action: Action) -> list[Part]:
    """Return what an action does: nothing where a stage has no such part."""
    whole = Part(action.stage, action.phase)
    split = [Part(action.stage, phase) for phase in "IW"] if action.phase == "B" else []
    return [part for part in (whole, *split) if part in stages.graph]
