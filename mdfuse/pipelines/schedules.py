"""Schedules of pipelines: for each rank group, its actions in order."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path

from mdfuse.errors import DefinitionError, reason, shown
from mdfuse.pipelines import timing
from mdfuse.pipelines.actions import Action, Cell, Overlap, Phase, of, read
from mdfuse.pipelines.checks import check
from mdfuse.pipelines.tables import NAMED, NamedSchedule, ScheduleGroup, placed
from mdfuse.pipelines.timing import Reads, Timing, unit

__all__ = ["Action", "Overlap", "Phase", "Schedule", "schedule_named"]


@dataclass(frozen=True)
class Schedule:
    """The table of a pipeline: the actions of each rank group, in order.

    A rank group is the ranks of one mesh. It does its actions one after the other, each as soon as
    its operands are there, so a table has no times: idle slots are shown only.

    Attributes:
        rows: for each rank group its actions; None for idle slots, `Overlap` for two as one.
        name: of the schedule.
        meshes: the names of the rank groups; none where they are not known.

    >>> print(Schedule.from_rows([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]))
    rank group 0  0F0 0F1 0B0 0B1
    rank group 1  1F0 1B0 1F1 1B1
    """

    rows: tuple[tuple[Cell, ...], ...]
    name: str = field(default="table", compare=False)
    meshes: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def named(
        cls,
        name: str,
        *,
        stages: int,
        microbatches: int,
        groups: int | Sequence[int] | None = None,
    ) -> Schedule:
        """Return the schedule of a name.

        Args:
            name: "forward", "gpipe", "1f1b", "interleaved", "zb1p", "zbv" or "dualpipev".
            stages: how many there are.
            microbatches: how many there are.
            groups: the number of rank groups, or the rank group of each stage. By default each
                stage has one; with "zbv" and "dualpipev", two stages share one.

        Raises:
            DefinitionError: no schedule has that name; it cannot have so many stages, rank groups
                and microbatches; its stages lie on other rank groups.

        >>> print(Schedule.named("zbv", stages=2, microbatches=1))
        rank group 0  0F0 1F0 1I0 1W0 0I0 0W0
        """
        named = NAMED.get(name) if isinstance(name, str) else None
        if named is None:
            because = "schedules have the names " + ", ".join(NAMED)
            hint = "one of them, or a table: mf.Schedule.from_csv(path), .from_rows(rows)"
            what = f"no schedule is called {shown(name)}"
            raise DefinitionError(what, because=because, hint=hint)
        _check_counts(stages, microbatches, groups)
        if groups is None:
            groups = max(1, stages // 2) if named.turns else stages
        where = placed(stages, groups, named.turns) if isinstance(groups, int) else tuple(groups)
        count = groups if isinstance(groups, int) else 1 + max(where, default=0)
        if not named.can(stages, count, microbatches):
            given = None if isinstance(groups, int) else where
            raise _impossible(name, named, stages, count, microbatches, given)
        natural = placed(stages, count, named.turns)
        if not named.anywhere and where != natural:
            raise _elsewhere(name, named, where, natural)
        rows = []
        for rank in range(count):
            group_stages = tuple(s for s, g in enumerate(where) if g == rank)
            group = ScheduleGroup(
                stages=group_stages, rank=rank, groups=count, microbatches=microbatches
            )
            rows.append(tuple(named.row(group)))
        return cls(tuple(rows), name=name)

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[str | Cell]]) -> Schedule:
        """Return a table of actions, or of texts as `torch.distributed.pipelining` writes them.

        Args:
            rows: one for each rank group; "" and None are idle slots.

        Raises:
            DefinitionError: a text is no action; there are no rows.

        >>> Schedule.from_rows([["0F0", "", "0I0", "0W0"]]).actions
        ((Action(stage=0, phase='F', microbatch=0), Action(stage=0, phase='I', microbatch=0), \
Action(stage=0, phase='W', microbatch=0)),)
        """
        if not isinstance(rows, Sequence | Iterator) or isinstance(rows, str | bytes):
            raise _no_rows(rows)
        return cls(tuple(_row(row, f"row {n}") for n, row in enumerate(rows)))

    @classmethod
    def from_csv(cls, path: str | PathLike[str]) -> Schedule:
        """Return the table of a file, a line for each rank group.

        Raises:
            DefinitionError: a cell is no action; the file is no table.
            OSError: the file cannot be read.
        """
        try:
            with open(path, newline="", encoding="utf-8") as file:
                rows = [*csv.reader(file)]
        except (TypeError, ValueError, csv.Error) as error:
            raise DefinitionError(
                f"{shown(path)} is no table of a schedule",
                because=reason(error),
                hint="the path of a file as to_csv writes it: 0F0,0B0 for the first rank group",
            ) from error
        name = Path(path).name
        return cls(tuple(_row(row, f"{name}:{n}") for n, row in enumerate(rows, 1)), name=name)

    def to_csv(self) -> str:
        """Return the table as CSV, which `torch.distributed.pipelining` loads.

        >>> print(Schedule.from_rows([["0F0", None, "0B0"]]).to_csv(), end="")
        0F0,,0B0
        """
        out = io.StringIO()
        rows = [["" if a is None else str(a) for a in row] for row in self.rows]
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()

    @cached_property
    def units(self) -> tuple[tuple[tuple[Action, ...], ...], ...]:
        """For each rank group its units, without idle slots: an action, or two that overlap."""
        return tuple(tuple(of(cell) for cell in row if cell is not None) for row in self.rows)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """For each rank group its actions, without idle slots."""
        return tuple(tuple(a for unit in row for a in unit) for row in self.units)

    @cached_property
    def owners(self) -> dict[int, int]:
        """Stage -> its rank group."""
        return {a.stage: g for g, row in enumerate(self.actions) for a in row}

    @property
    def groups(self) -> int:
        """The number of rank groups."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max((a.stage for row in self.actions for a in row), default=-1)

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max((a.microbatch for row in self.actions for a in row), default=-1)

    def has(self, phase: Phase) -> bool:
        """Return whether any action is of a phase."""
        return any(a.phase == phase for row in self.actions for a in row)

    def timed(
        self, costs: Callable[[Action], float] = unit, *, reads: Reads | None = None
    ) -> Timing:
        """Return the times of all actions: makespan, bubble, live microbatches.

        Args:
            costs: the time of an action, more than 0. By default forwards, and each part of a
                backward, take 1.
            reads: stage -> the stages that it reads; by default each reads the one before it.

        Raises:
            DefinitionError: the rank groups wait for each other.

        >>> timed = Schedule.named("1f1b", stages=4, microbatches=8).timed()
        >>> timed.makespan, timed.work, timed.live
        (33.0, (24.0, 24.0, 24.0, 24.0), (4, 3, 2, 1))
        """
        lanes = timing.lanes(self.units, costs, reads or timing.chain(self.units))
        return Timing(name=self.name, lanes=lanes, names=self.labels)

    def merged(
        self, *, reads: Reads | None = None, late_first: bool = False
    ) -> tuple[tuple[int, Action], ...]:
        """Return all actions in one order that keeps every row's, each with its rank group.

        They come as they would begin if all took the same time.

        Args:
            reads: as `timed` takes it.
            late_first: among actions that begin together, later stages come first; otherwise
                earlier ones do.

        Raises:
            DefinitionError: the rank groups wait for each other.
        """
        lanes = self.timed(reads=reads).lanes
        sign = -1 if late_first else 1
        slots = [
            (s.start, sign * s.action.stage, g, s.action)
            for g, lane in enumerate(lanes)
            for s in lane
        ]
        return tuple((g, action) for _, _, g, action in sorted(slots))

    def check(
        self,
        *,
        stages: int,
        microbatches: int,
        groups: int | Sequence[int],
        gradients: bool = True,
        reads: Reads | None = None,
    ) -> None:
        """Raise unless this is a table for a pipeline.

        Args:
            stages: how many the pipeline has.
            microbatches: how many it has.
            groups: how many rank groups it has, round which its stages go; or the rank group of
                each stage.
            gradients: whether its stages go back as well.
            reads: as `timed` takes it.

        Raises:
            DefinitionError: it has another number of rank groups; an action is of another stage or
                microbatch, on another rank group, missing, or there twice; a backward is there both
                whole and in parts; the rank groups wait for each other.

        >>> Schedule.from_rows([["0F0", "0F1"]]).check(
        ...     stages=1, microbatches=2, groups=1, gradients=False
        ... )
        """
        where = placed(stages, groups, False) if isinstance(groups, int) else tuple(groups)
        check(self.units, where, microbatches, gradients, reads)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the rank groups."""
        names = [f" ({name})" for name in self.meshes] or [""] * self.groups
        return tuple(f"rank group {g}{name}" for g, name in enumerate(names))

    def __str__(self) -> str:
        width = max(map(len, self.labels), default=0)
        rows = zip(self.labels, ([c for c in row if c] for row in self.rows), strict=True)
        return "\n".join(f"{label:{width}}  {' '.join(map(str, row))}" for label, row in rows)


def _row(cells: Iterable[str | Cell], where: str) -> tuple[Cell, ...]:
    if not isinstance(cells, Sequence | Iterator) or isinstance(cells, str | bytes):
        raise _no_rows(cells)
    row: list[Cell] = []
    for cell in cells:
        if not isinstance(cell, str | Cell):
            raise _no_rows(cell)
        row += read(cell, where) if isinstance(cell, str) else (cell,)
    return tuple(row)


#: Return the schedule of a name.
schedule_named = Schedule.named


def _impossible(
    name: str, named: NamedSchedule, p: int, g: int, m: int, where: Sequence[int] | None
) -> DefinitionError:
    """Return the error for an impossible schedule, with the nearest possible one or others.

    Args:
        name: of the schedule.
        named: the schedule, with its rules.
        p: the number of stages.
        g: the number of rank groups.
        m: the number of microbatches.
        where: the rank group of each stage; None where it follows from the schedule.
    """
    beside = (n for d in range(3 * m + 2 * p) for n in (m - d, m + d) if n > 0)
    near = next((n for n in beside if named.can(p, g, n)), None)
    others = [
        n
        for n, other in NAMED.items()
        if n != "forward"
        and other.can(p, g, m)
        and (where is None or other.anywhere or where == placed(p, g, other.turns))
    ]
    groups = f"{g} rank groups" if where is None else f"rank groups {' '.join(map(str, where))}"
    return DefinitionError(
        f"schedule {name!r} cannot have {p} stages on {groups} with {m} microbatches",
        because=named.rule,
        hint=f"microbatches={near}" if near else "one of " + ", ".join(others),
    )


#: The most forwards of a table: a larger one would take minutes to make.
_MOST = 1 << 20


def _no_rows(given: object) -> DefinitionError:
    return DefinitionError(
        f"{shown(given)} where rows of a schedule belong",
        because="a table has a list of actions for each rank group",
        hint='Schedule.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])',
    )


def _check_counts(stages: int, microbatches: int, groups: object) -> None:
    """Raise DefinitionError for invalid counts, and for tables that are too large."""
    placed = groups if isinstance(groups, list | tuple) else () if groups is None else (groups,)
    given: dict[str, tuple[object, Sequence[object]]] = {
        "stages": (stages, (stages,)),
        "microbatches": (microbatches, (microbatches,)),
        "groups": (groups, placed),
    }
    for name, (value, numbers) in given.items():
        if not all(type(n) is int and 0 <= n <= _MOST for n in numbers):
            raise DefinitionError(
                f"a schedule with {name}={shown(value)}",
                because=f"it is counted, to {_MOST} at most; groups may be a list",
                hint="stages=4, microbatches=8",
            )
    if stages * microbatches > _MOST:
        raise DefinitionError(
            f"a schedule of {stages} stages and {microbatches} microbatches",
            because=f"its table has at most {_MOST} forwards",
            hint="fewer microbatches; without a schedule, one mesh takes them in a loop",
        )


def _elsewhere(
    name: str, named: NamedSchedule, where: Sequence[int], natural: Sequence[int]
) -> DefinitionError:
    return DefinitionError(
        f"schedule {name!r} with stages on rank groups {' '.join(map(str, where))}",
        because=f"{named.rule}: {' '.join(map(str, natural))}",
        hint="put the stages on meshes in that order, or take gpipe, whose stages lie anywhere",
    )
