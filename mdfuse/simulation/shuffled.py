"""Simulated runs in a random order: every stream and every transfer goes on by itself.

As on GPUs the host only queues: it allocates, makes views and issues posts in program order, while
what a queued operation computes appears later. Results that are not there yet are poisoned, so
that a missing sync or wait shows in some order.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from mdfuse.errors import ProgramError
from mdfuse.hir.instructions import MEMORY
from mdfuse.plan.build import Plan
from mdfuse.plan.context import PlanStep
from mdfuse.plan.index_checks import IndexChecks
from mdfuse.plan.lines import Slots
from mdfuse.plan.numbered_streams import CALLER
from mdfuse.plan.pending import Pending
from mdfuse.plan.signature import copy_alike, span
from mdfuse.simulation.network import SimNetwork

#: Steps that the host does by itself, in program order. Views are none: what they show may be a
#: copy of what their stream has still to write.
_ON_HOST = (*MEMORY, "set_stream", "keep", "same")


def run_shuffled(
    plans: Sequence[Plan],
    slots: Sequence[Slots],
    network: SimNetwork,
    checks: IndexChecks,
    seed: int,
) -> tuple[list[Any], ...]:
    """Run all ranks in an order drawn from a seed.

    Returns:
        Copies of the outputs of each rank, as the caller's stream sees them at the end of its work.

    Raises:
        CommunicationError: no rank can go on, or a post is left over.
    """
    draw = random.Random(seed)
    ranks = [_Queues(plan, s) for plan, s in zip(plans, slots, strict=True)]
    for rank in ranks:
        rank.issue()
    checks.take()  # of what binds results before their operands are there
    while True:
        heads = [(rank, stream) for rank in ranks for stream in rank.ready()]
        choices = len(heads) + len(network.ready)
        if not choices:
            break
        n = draw.randrange(choices)
        if n < len(heads):
            rank, stream = heads[n]
            rank.go(stream)
        else:
            network.move(n - len(heads))
    network.check_finished(
        [f"rank {i} waits at {t.label}" for i, r in enumerate(ranks) for t in r.heads()]
    )
    return tuple(rank.outputs for rank in ranks)


@dataclass(frozen=True, slots=True)
class _Task:
    """An operation that is queued on a stream, and when it may run."""

    label: str
    run: Callable[[], object]
    may_run: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class _Issued:
    """The handle in a post's slot once it is issued; `pending` once its stream has come to it."""

    pending: Pending | None = None


@dataclass
class _Queues:
    """The streams of one rank.

    A queued operation works on the buffers that were in the slots when the host issued it.
    """

    plan: Plan
    slots: Slots
    queues: dict[int, deque[_Task]] = field(default_factory=lambda: defaultdict(deque))
    queued: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    outputs: list[Any] = field(default_factory=list)
    steps: Iterator[PlanStep] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = iter(self.plan.steps)

    def issue(self) -> None:
        """Issue the plan as a host does, without waiting, up to its end or to a fetch.

        The host goes on once the stream has come to what is fetched.
        """
        for step in self.steps:
            if step.op == "fetch":
                self.push(step.stream, _Task(step.label, partial(self.fetch, step)))
                return
            self.take(step)
        self.push(CALLER, _Task("return", self.finish))

    def fetch(self, step: PlanStep) -> None:
        step.run(self.slots)
        self.issue()

    def finish(self) -> None:
        """Copy the outputs, as the caller's stream sees them at the end of its work."""
        outputs = self.plan.finish(self.slots)
        self.outputs = [x.clone() if isinstance(x, Tensor) else x for x in outputs]

    def push(self, stream: int, task: _Task) -> None:
        self.queues[stream].append(task)
        self.queued[stream] += 1

    def take(self, step: PlanStep) -> None:
        """Queue a step, or do it at once where the host does it."""
        if step.op in _ON_HOST:
            step.run(self.slots)
        elif step.joins is not None:
            self.push(step.stream, self.join(step.label, step.joins))
        elif step.waits is not None:
            self.push(step.stream, self.wait(step, *step.waits))
        elif step.op == "post":
            self.push(step.stream, self.post(step))
        else:
            self.push(step.stream, _Task(step.label, self.effect(step)))

    def join(self, label: str, other: int) -> _Task:
        goal = self.queued[other]
        return _Task(label, _nothing, lambda: self.passed(other) >= goal)

    def passed(self, stream: int) -> int:
        """Return how many tasks of a stream are done."""
        return self.queued[stream] - len(self.queues.get(stream, ()))

    def post(self, step: PlanStep) -> _Task:
        """Return the task of a post, which takes its place among those of its team now."""
        for poster in step.posters:
            poster.announce()  # type: ignore[attr-defined]
        issued = [_Issued() for _ in step.outputs]
        for slot, handle in zip(step.outputs, issued, strict=True):
            self.slots[slot] = handle
        now = list(self.slots)

        def run() -> None:
            step.run(now)
            for slot, handle in zip(step.outputs, issued, strict=True):
                handle.pending = now[slot]

        return _Task(step.label, run)

    def wait(self, step: PlanStep, slot: int, piece: int | None) -> _Task:
        handle, now = self.slots[slot], list(self.slots)

        def may_run() -> bool:
            return handle.pending is not None and handle.pending.is_done(piece)

        def run() -> None:
            now[slot] = handle.pending
            step.run(now)

        return _Task(step.label, run, may_run)

    def effect(self, step: PlanStep) -> Callable[[], object]:
        """Return what a step does to data; buffers that it binds exist at once, poisoned."""
        before = list(self.slots)
        fresh = [x for x in step.outputs if before[x] is None]
        if not fresh:
            return lambda: step.run(before)
        self.bind(step)
        known = {_memory(before[x]) for x in step.inputs if isinstance(before[x], Tensor)}
        buffers = {x: self.slots[x] for x in fresh if isinstance(self.slots[x], Tensor)}
        buffers = {x: buffer for x, buffer in buffers.items() if _memory(buffer) not in known}
        for buffer in buffers.values():
            _poison(buffer)

        def run() -> None:
            step.run(before)
            for x, buffer in buffers.items():
                copy_alike(before[x], buffer)

        return run

    def bind(self, step: PlanStep) -> None:
        """Let a step bind its outputs, though its inputs are not there yet.

        Integers that are still anything may be no divisors, and no places in a table. What the
        step writes over keeps its contents until its stream comes to it.
        """
        written = [x for x in (self.slots[n] for n in step.outputs) if isinstance(x, Tensor)]
        contents = [(x, x.clone()) for x in written]
        self.try_to_bind(step)
        for x, before in contents:
            copy_alike(before, x)

    def try_to_bind(self, step: PlanStep) -> None:
        for number in (None, 1, 0):
            slots = self.slots if number is None else [_filled(x, number) for x in self.slots]
            try:
                step.run(slots)
            except (RuntimeError, IndexError, ProgramError):
                if number == 0:
                    raise
            else:
                for x in step.outputs:
                    self.slots[x] = slots[x]
                return

    def heads(self) -> list[_Task]:
        """Return the first task of each stream."""
        return [queue[0] for queue in self.queues.values() if queue]

    def ready(self) -> list[int]:
        """Return the streams that can go on."""
        return [k for k, queue in self.queues.items() if queue and queue[0].may_run()]

    def go(self, stream: int) -> None:
        self.queues[stream][0].run()
        self.queues[stream].popleft()


def _nothing() -> None:
    """Do nothing: a join only orders what is around it."""


def _filled(x: Any, number: int) -> Any:
    """Return integers that are all the same, which lie as those of x do."""
    if not isinstance(x, Tensor) or x.dtype.is_floating_point:
        return x
    first, behind = span(x)
    return x.new_full(((behind - first) // x.itemsize,), number).as_strided(x.shape, x.stride())


def _memory(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())


def _poison(x: Tensor) -> None:
    """Fill a buffer with NaN, or with zero for integers, which may be indices."""
    x.fill_(float("nan") if x.is_floating_point() or x.is_complex() else 0)
