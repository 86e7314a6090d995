"""Read this process's position in its plans off the stack, at no cost to runs.

A plan is a function with one line per call. So a thread's line number gives the instruction, and
the posts and waits before it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from types import FrameType
from typing import Protocol
from weakref import WeakValueDictionary

from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.program import HostProgram
from mdfuse.interpreter.stacks import seen
from mdfuse.layouts.call import Call


class WatchedStep(Protocol):
    """The attributes of a plan's step that are read here: see `mdfuse.plan.context.PlanStep`."""

    @property
    def op(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def calls(self) -> tuple[Call, ...]: ...
    @property
    def outputs(self) -> tuple[int, ...]: ...
    @property
    def waits(self) -> tuple[int, int | None] | None: ...
    @property
    def instruction(self) -> int: ...


class WatchedPlan(Protocol):
    """The attributes of a plan that are read here: see `mdfuse.plan.build.Plan`."""

    @property
    def tally(self) -> RunCount | None: ...
    @property
    def steps(self) -> Sequence[WatchedStep]: ...
    @property
    def program(self) -> HostProgram: ...
    @property
    def lines_of_run(self) -> Sequence[int]:
        """The number of the call at each line of its function."""

    def step_number_of(self, line: int) -> int:
        """Return the number of the step to which a call belongs, from its number."""


#: The file name of a plan's function -> the plan.
_plans: WeakValueDictionary[str, WatchedPlan] = WeakValueDictionary()

#: The attribute of an error that names the inputs which its run may have written.
_WROTE = "_mdfuse_wrote"


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class RunCount:
    """The number of runs of one program on this rank, by which ranks compare their progress.

    Attributes:
        name: of the program.
        serial: the number of the program, the same on all ranks.
        runs: how many runs began.
        refused: how many of them this rank refused.
        posted: the number of posts in one run, by kind and team; known once there is a plan.
    """

    name: str
    serial: int
    runs: int = 0
    refused: int = 0
    posted: Mapping[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The program's name and number, the same on all ranks."""
        return f"@{self.name} ({self.serial})"

    @property
    def occasion(self) -> str:
        """The name of the run that began last, the same on all ranks."""
        return f"{self.serial}/{self.runs}"


@dataclass(frozen=True, slots=True)
class ActiveStep:
    """A step of a plan that is running, by its number."""

    plan: WatchedPlan
    number: int

    @property
    def step(self) -> WatchedStep:
        return self.plan.steps[self.number]

    @property
    def is_waiting(self) -> bool:
        """True if the step is a call of a communication library."""
        return self.step.op in ("post", "wait")

    @property
    def open(self) -> list[int]:
        """The numbers of the steps whose posts are not waited for yet, up to this step."""
        waits = (step.waits for step in self.plan.steps[: self.number])
        over = {wait[0] for wait in waits if wait is not None}
        if self.step.waits:
            over.discard(self.step.waits[0])
        steps = enumerate(self.plan.steps[: self.number + 1])
        return [n for n, step in steps if step.calls and not over & set(step.outputs)]

    @property
    def current(self) -> int | None:
        """The number of the step whose post this step makes or waits for; None: neither."""
        if self.step.waits is None:
            return self.number if self.step.calls else None
        handle = self.step.waits[0]
        return next((n for n in self.open if handle in self.plan.steps[n].outputs), None)

    @property
    def written(self) -> frozenset[str]:
        """The inputs that the run may have written, as its instructions up to this step say."""
        program, steps = self.plan.program, self.plan.steps
        last = max((step.instruction for step in steps[: self.number + 1]), default=-1)
        later = (step.instruction for step in steps[self.number + 1 :])
        stop = next((n for n in later if n > last), len(program.instructions))  # behind its unit
        flow = dataflow(program)
        writes = {x for i in program.instructions[:stop] for x in flow.effects(i).writes}
        return frozenset(n for n in program.inputs if flow.memory(n) in writes)


def register(file: str, plan: WatchedPlan) -> None:
    """Note the plan whose function has this file name, and count the posts of a run."""
    _plans[file] = plan
    if plan.tally is not None:
        calls = (call for step in plan.steps for call in step.calls)
        plan.tally.posted = Counter((call.kind, call.team) for call in calls)


def running() -> ActiveStep | None:
    """Return the step that this process is at; None where it runs no plan.

    A thread that waits in a communication is preferred, then the main one.
    """
    main = threading.main_thread().ident
    places = {t: [x for x in xs if x is not None] for t, xs in seen(_at).items()}
    innermost = {thread: xs[0] for thread, xs in places.items() if xs}
    order = sorted(innermost, key=lambda thread: (not innermost[thread].is_waiting, thread != main))
    return innermost[order[0]] if order else None


def raised(error: BaseException | None) -> ActiveStep | None:
    """Return the step that raised an error or one of its causes; None if no plan did."""
    return next((place for one in causes(error) if (place := _raised_by(one))), None)


def note_written(error: BaseException, names: Collection[str]) -> None:
    """Note which inputs a run may have written that goes through plans step by step."""
    vars(error)[_WROTE] = frozenset(names)


def wrote(error: BaseException) -> frozenset[str] | None:
    """Return the inputs that a run may have written before it raised an error; None: unknown."""
    for one in causes(error):
        noted: frozenset[str] | None = vars(one).get(_WROTE)
        place = _raised_by(one)
        if noted is not None or place is not None:
            return noted if place is None else place.written
    return None


def _raised_by(error: BaseException) -> ActiveStep | None:
    for frame, line in walk_tb(error.__traceback__):
        place = _place(frame.f_code.co_filename, line)
        if place is not None:
            return place
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then those that it came of: its cause, and what was handled meanwhile."""
    left, known = [error], set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in known:
            known.add(id(one))
            yield one
            left += [one.__context__, one.__cause__]


def _at(frame: FrameType) -> ActiveStep | None:
    return _place(frame.f_code.co_filename, frame.f_lineno)


def _place(file: str, line: int | None) -> ActiveStep | None:
    """Return the step at a line of a plan; a frame that just begins has no line yet."""
    plan = _plans.get(file) if file.startswith("<plan ") else None
    if plan is None or line is None or not 2 <= line < 2 + len(plan.lines_of_run):
        return None
    return ActiveStep(plan, plan.step_number_of(plan.lines_of_run[line - 2]))
