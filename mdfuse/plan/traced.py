"""Plans of traced runs: the function of a plan, written once more with stamps between its lines.

A run that is not traced has another function, without them, and pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mdfuse.hir.counted_rows import bytes_received
from mdfuse.hir.program import Instruction
from mdfuse.layouts.call import Call
from mdfuse.plan.build import Plan
from mdfuse.plan.context import PlanStep
from mdfuse.plan.device_clock import DeviceClock
from mdfuse.plan.lines import Stamping
from mdfuse.plan.numbered_streams import CALLER
from mdfuse.seeing.events import name_of
from mdfuse.seeing.trace_files import Entry, Stamps, TraceFile

#: Steps that may never end, where other ranks do not come.
_MAY_HANG = ("wait", "barrier")


@dataclass(frozen=True, kw_only=True)
class TracedPlan(Plan):
    """A plan whose runs are noted in a file.

    Attributes:
        stamps: notes the times of the host.
        clock: notes those of a GPU; None where it computes on a CPU.
    """

    stamps: Stamps
    clock: DeviceClock | None = None

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Run once; the notes are written also after an error."""
        assert self.function is not None  # written before the clock starts
        is_done = False
        if self.clock is not None:
            self.clock.begin()
        self.stamps.begin()
        try:
            results = super().call(values)
            is_done = True
            return results
        finally:
            times = self.clock.times() if is_done and self.clock is not None else ()
            self.stamps.end(is_done, times)


def traced(plan: Plan, file: TraceFile) -> TracedPlan:
    """Return a plan that notes its times in a file, one from each step to the next.

    Args:
        plan: of this rank; its function is not made yet.
        file: of this rank.
    """
    entries: list[Entry | None] = []
    flushed, last, works = [], dict[int, int](), dict[int, int]()
    for first, end, step, entry in described(plan, file.rank):
        if step.op in _MAY_HANG:
            flushed.append(first)
            entries.append(None)
        if entry.part == "work":
            works[len(entries)] = first
        last[len(entries)] = end
        entries.append(entry)
    stamps = file.stamps(plan.name, entries)
    before: dict[int, Callable[[], object]] = dict.fromkeys(flushed, stamps.flush)
    behind: dict[int, Callable[[], object]] = dict.fromkeys(last.values(), stamps.note)
    clock = DeviceClock(plan.device, works) if plan.device.type == "cuda" else None
    if clock is not None:
        before |= {first: clock.before(n) for n, first in works.items()}
        behind |= {last[n]: clock.behind(n, stamps.note) for n in works}
    settings = {f.name: getattr(plan, f.name) for f in fields(plan)}
    settings["stamping"] = Stamping(before, behind).around(plan.stamping)
    traced_plan = TracedPlan(**settings, stamps=stamps, clock=clock)
    vars(traced_plan)["owned"] = plan.owned  # the buffers are made already
    return traced_plan


def described(plan: Plan, rank: int) -> Iterator[tuple[int, int, PlanStep, Entry]]:
    """Yield first and last line of each step of a plan, the step, and its description."""
    posts = {handle: s for s in reversed(plan.steps) if s.calls for handle in s.outputs}
    for first, last, step in _runs(plan):
        yield first, last, step, _entry(step, plan.program.instructions, rank, posts)


def _runs(plan: Plan) -> list[tuple[int, int, PlanStep]]:
    """Return (first line, last line, step) for steps with calls left to make.

    Lines that only drop values belong to the step in front of them; but a wait is a step also
    without calls, since later work is queued behind the post.
    """
    owner = [step for step in plan.steps for _ in step.lines]
    runs: list[tuple[int, int, PlanStep]] = []
    for n, number in enumerate(plan.lines_of_run):
        step, line = owner[number], plan.owned.lines[n]
        is_noted = line.run is not None or step.waits is not None
        if runs and (runs[-1][2] is step or not is_noted):
            runs[-1] = runs[-1][0], n, runs[-1][2]
        elif is_noted:
            runs.append((n, n, step))
    return runs


def _entry(
    step: PlanStep, code: Sequence[Instruction], rank: int, posts: Mapping[int, PlanStep]
) -> Entry:
    """Return the description of a step; `posts` has the steps that make handles."""
    i = code[step.instruction] if step.instruction >= 0 else None
    source = str(i.source or "") if i is not None else ""
    lane = "host" if step.stream == CALLER else f"stream {step.stream}"
    if step.waits is not None:
        handle = step.waits[0]
        of = posts.get(handle)
        name = f"wait {_called(of.calls)}" if of is not None else "wait"
        wait = "wait" if step.stream == CALLER else f"wait {lane}"
        known = handle if of is not None else None
        return Entry(
            name=name, lane=wait, part="wait", instruction=step.instruction, source=source,
            handle=known,
        )  # fmt: skip
    if step.calls:
        return _posted(step, i, rank, lane, source)
    name = name_of(i) if i is not None else step.op
    return Entry(name=name, lane=lane, instruction=step.instruction, source=source)


def _posted(step: PlanStep, i: Instruction | None, rank: int, lane: str, source: str) -> Entry:
    sends = {peer for call in step.calls for peer in call.sends}
    recvs = {peer for call in step.calls for peer in call.recvs}
    comm = i.comm if i is not None else None
    return Entry(
        name=f"post {_called(step.calls)}",
        lane=lane,
        part="post",
        instruction=step.instruction,
        source=source,
        nbytes=bytes_received(i, rank) if i is not None and comm is not None else 0,
        detail=f"{comm.source} -> {comm.destination}" if comm is not None else "",
        handles=step.outputs,
        team=step.calls[0].team,
        to=min(sends) if len(sends) == 1 and not recvs else None,
        of=min(recvs) if len(recvs) == 1 and not sends else None,
    )


def _called(calls: Sequence[Call]) -> str:
    call = calls[0]
    return f"{call.kind}[{call.reduce_op}]" if call.reduce_op else call.kind
