"""Times of the actions of each rank group, by a table of costs: nothing is run.

A group takes its actions in order, each as soon as the actions that it needs are done:

    1F0   needs   0F0            the forward of the stage that its stage reads
    1B0   needs   1F0, 2B0       its own forward, and the backward of the stage that reads it
    1I0   likewise
    1W0   needs   1I0

Two actions that overlap are one unit: it begins when both can, takes the sum of their times, and
both are done at its end. So the prediction is never faster than a real overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import assert_never

from mdfuse.errors import DefinitionError
from mdfuse.pipelines.actions import Action

#: stage -> the stages whose results it reads
Reads = Mapping[int, Sequence[int]]
#: For each rank group its units, in order: one action each, or two that overlap.
Rows = Sequence[Sequence[tuple[Action, ...]]]

_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def unit(action: Action) -> float:
    """Return the default cost of an action: forward, `I` and `W` take 1, a backward takes 2."""
    return _UNITS[action.phase]


@dataclass(frozen=True, slots=True)
class Slot:
    """An action with its times.

    Attributes:
        action: the action.
        start: when it begins; from 0 on, in the unit of the costs.
        stop: when it ends.
    """

    action: Action
    start: float
    stop: float


def _number(time: float) -> str:
    return f"{round(time, 2):g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of a schedule; prints as a picture, and notebooks show it as SVG.

    Attributes:
        name: of the schedule.
        lanes: for each rank group, its actions in their times.
        names: the name of each rank group.
        shown: returns a time as text.
    """

    name: str
    lanes: tuple[tuple[Slot, ...], ...]
    names: tuple[str, ...]
    shown: Callable[[float], str] = _number

    @property
    def makespan(self) -> float:
        """The time when the last group is done."""
        return max((lane[-1].stop for lane in self.lanes if lane), default=0.0)

    @property
    def work(self) -> tuple[float, ...]:
        """The working time of each group."""
        return tuple(sum(s.stop - s.start for s in lane) for lane in self.lanes)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The idle time of each group: the makespan less its working time."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def live(self) -> tuple[int, ...]:
        """The most forwards that each group holds for backwards that are not done.

        A stage's microbatch counts for itself. `W` ends it where the backward is in two parts.
        """
        return tuple(_live([s.action for s in lane]) for lane in self.lanes)

    def __str__(self) -> str:
        from mdfuse.pipelines.schedule_picture import text

        return text(self)

    def svg(self) -> str:
        """Return the picture as an SVG element, in the colours of a light or a dark page."""
        from mdfuse.pipelines.schedule_picture import svg

        return svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()


def _live(row: Sequence[Action]) -> int:
    if not any(a.phase in "BW" for a in row):
        return min(1, len(row))
    return max(accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[a.phase] for a in row))


def chain(rows: Rows) -> Reads:
    """Return the reads of a chain: each stage reads the one before it."""
    stages = {a.stage for a in _actions(rows)}
    return {s: (s - 1,) if s else () for s in sorted(stages)}


def _actions(rows: Rows) -> Iterator[Action]:
    return (a for row in rows for unit in row for a in unit)


def lanes(
    rows: Rows, costs: Callable[[Action], float], reads: Reads
) -> tuple[tuple[Slot, ...], ...]:
    """Return the times of the actions of each group.

    Args:
        rows: for each group, its units in order.
        costs: the time of an action, more than 0.
        reads: stage -> the stages that it reads.

    Raises:
        DefinitionError: no group can go on.
    """
    needs = _Needs(rows, reads)
    done: dict[Action, float] = {}
    at, free = [0] * len(rows), [0.0] * len(rows)
    slots: list[list[Slot]] = [[] for _ in rows]
    is_moving = True
    while is_moving:
        is_moving = False
        for g, row in enumerate(rows):
            while at[g] < len(row) and all(n in done for n in needs.of(row[at[g]])):
                start = max([free[g], *(done[n] for n in needs.of(row[at[g]]))])
                for action in row[at[g]]:
                    slots[g].append(Slot(action, start, start + costs(action)))
                    start = slots[g][-1].stop
                done |= dict.fromkeys(row[at[g]], start)
                free[g], is_moving = start, True
                at[g] += 1
    if any(n < len(row) for n, row in zip(at, rows, strict=True)):
        raise _stuck(rows, at, needs, done)
    return tuple(map(tuple, slots))


class _Needs:
    """The dependences of actions, where the backward of a stage may be in two parts."""

    def __init__(self, rows: Rows, reads: Reads) -> None:
        self.split = {(a.stage, a.microbatch) for a in _actions(rows) if a.phase == "I"}
        self.reads = reads
        self.readers: dict[int, list[int]] = {}
        for stage, operands in reads.items():
            for s in operands:
                self.readers.setdefault(s, []).append(stage)

    def of(self, unit: tuple[Action, ...]) -> Iterator[Action]:
        """Return the actions that a unit needs, without its own."""
        return (need for action in unit for need in self._of(action) if need not in unit)

    def _of(self, action: Action) -> Iterator[Action]:
        stage, k = action.stage, action.microbatch
        match action.phase:
            case "F":
                yield from (Action(s, "F", k) for s in self.reads.get(stage, ()))
            case "W":
                yield Action(stage, "I", k)
            case "B" | "I":
                yield Action(stage, "F", k)
                for s in self.readers.get(stage, ()):
                    yield Action(s, "I" if (s, k) in self.split else "B", k)
            case _:
                assert_never(action.phase)


def _stuck(
    rows: Rows, at: Sequence[int], needs: _Needs, done: Mapping[Action, float]
) -> DefinitionError:
    """Return the error that lists the wait of each group."""
    place = {a: g for g, row in enumerate(rows) for unit in row for a in unit}
    waits = []
    for g, row in enumerate(rows):
        if at[g] == len(row):
            continue
        want = next(a for a in needs.of(row[at[g]]) if a not in done)
        held = "which no row has"
        if want in place:
            ahead = rows[place[want]][at[place[want]]]
            behind = "next" if want in ahead else f"behind {ahead[0]}"
            held = f"which row {place[want]} has {behind}"
        waits.append(f"row {g} is at {row[at[g]][0]}, which needs {want}, {held}")
    return DefinitionError(
        "table of a schedule: the rank groups wait for each other",
        because="\n              ".join(waits),
        hint="put what is needed in front of what waits for it",
    )
