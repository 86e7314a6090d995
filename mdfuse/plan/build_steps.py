"""Build the steps of a plan, instruction by instruction, with streams and bindings at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mdfuse.hir.analysis.dataflow import shared_operand
from mdfuse.hir.instructions import COMMUNICATIONS, MEMORY, PURE_VIEWS, op_of, row_of
from mdfuse.hir.program import Instruction
from mdfuse.hir.row_norms import unit_behind
from mdfuse.ir import ops
from mdfuse.plan import buffer_ops, counted_steps, numbered_streams
from mdfuse.plan.allocation import allocate
from mdfuse.plan.context import CALLER_SLOT, Context, PlanStep, label
from mdfuse.plan.lines import Line, SlotRef, drop
from mdfuse.plan.local_ops import compute
from mdfuse.plan.numbered_streams import CALLER
from mdfuse.plan.posting import Posts


@dataclass
class Builder:
    """Makes the steps of instructions in order, and tracks the state at each of them.

    Attributes:
        context: the rank's slots and bindings.
        posts: prepares its communications.
        steps: the steps made so far.
        handles: values of get_stream -> the index of the stream.
        homes: slot -> the stream that was current when it was bound.
        current: the stream that is current.
        switches: whether a step switches or joins CUDA streams.
        why: the reason why the current step cannot be in a CUDA graph; None: it can.
        number: of the current instruction.
    """

    context: Context
    posts: Posts
    steps: list[PlanStep] = field(default_factory=list)
    handles: dict[str, int] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    current: int = CALLER
    switches: bool = False
    why: str | None = None
    number: int = -1

    def build(self, instructions: Sequence[Instruction]) -> None:
        """Make the steps of all instructions."""
        for self.number, i in enumerate(instructions):
            n = self.number
            unit = unit_behind(instructions, n) if i.op == "post" and "then" in i.kwargs else None
            if unit is not None:
                self.posts.norms.units[i.outputs[0]] = instructions[unit]
            self.add(i, _following(instructions, n) if i.op == "post" else None)
        self.number = -1
        self.finish()
        if self.context.fuse is not None:
            self.steps = self.context.fuse.finish(self.steps, self.context)

    def add(self, i: Instruction, following: Instruction | None) -> None:
        why = self.context.host_values.why_eager(i) if i.op != "launch" else None
        is_grouped = self.posts.is_grouped
        # a group is posted at once: where one member cannot be in a graph, the post cannot
        self.why = why or (self.why if is_grouped else None)
        match i.op:
            case "return":
                return
            case "get_stream":
                self.handles[i.outputs[0]] = self.current
            case "set_stream":
                self.switch(i)
            case "sync":
                self.sync(i)
            case "free":
                self.free(i)
            case "launch":
                self.launch(i)
            case op if op in COMMUNICATIONS:
                for step in self.posts.steps(i, following):
                    self.append(step)
            case _:
                self.append(local_step(i, self.context))

    def finish(self) -> None:
        """Keep the memory of the outputs for the caller's stream, which reads them."""
        context, program = self.context, self.context.program
        self.posts.exchanges.finish()
        mine = tuple(n for n in program.outputs if program.has(n, context.rank))
        self.current = CALLER
        self.guard(tuple(map(context.slot, mine)))

    def append(self, step: PlanStep) -> None:
        """Add a step on the current stream."""
        number = self.number
        self.steps.append(replace(step, stream=self.current, eager=self.why, instruction=number))
        for slot in step.outputs:
            self.homes.setdefault(slot, self.current)
        self.guard((*step.inputs, *step.outputs))

    # -- streams ---------------------------------------------------------------------------------

    def handle(self, index: int) -> SlotRef | torch.cuda.Stream:
        """Return a stream as an argument of a call."""
        return (
            SlotRef(CALLER_SLOT)
            if index == CALLER
            else numbered_streams.stream(self.context.device, index)
        )

    def guard(self, slots: Sequence[int]) -> None:
        """Keep the memory of buffers that were made on another stream than the current one."""
        away = tuple(x for x in slots if self.homes.get(x, self.current) != self.current)
        if away and self.context.has_streams:
            line = Line(
                run=numbered_streams.keep, args=(self.handle(self.current), *map(SlotRef, away))
            )
            self.steps.append(PlanStep(lines=(line,), label="keep", op="keep"))

    def switch(self, i: Instruction) -> None:
        self.current = to = self.stream(i)
        if self.context.has_streams:
            self.switches = True
            self.context.stream = numbered_streams.raw(self.context.device, to, self.context.caller)
            line = Line(run=torch.cuda.set_stream, args=(self.handle(to),))
            self.steps.append(
                PlanStep(lines=(line,), label="set_stream", op="set_stream", stream=to)
            )

    def sync(self, i: Instruction) -> None:
        other = self.stream(i)
        lines: tuple[Line, ...] = ()
        if self.context.has_streams:
            self.switches = True
            event = numbered_streams.event(self.context.device, other)
            args = (event, self.handle(other), self.handle(self.current))
            lines = (Line(run=numbered_streams.join, args=args),)
        step = PlanStep(lines=lines, label="sync", op="sync", stream=self.current, joins=other)
        self.steps.append(step)

    def stream(self, i: Instruction) -> int:
        """Return the index of the stream that an instruction names."""
        return int(i.kwargs["stream"]) if i.attrs else self.handles[i.reads[0]]

    # -- values ----------------------------------------------------------------------------------

    def free(self, i: Instruction) -> None:
        self.drop([self.release(name) for name in i.reads], label(i))

    def release(self, name: str) -> int:
        """Forget a name, and return the slot that it had."""
        slot = self.context.slot(name)
        self.homes.pop(slot, None)
        self.context.release(name)
        return slot

    def drop(self, slots: Sequence[int], what: str) -> None:
        """Add a step that empties slots."""
        step = PlanStep(lines=(drop(*slots),), label=what, op="free", inputs=tuple(slots))
        self.steps.append(step)

    def launch(self, i: Instruction) -> None:
        """Add the expressions of a host unit; inner values are dropped after their last use."""
        context, start = self.context, len(self.steps)
        joined = self.posts.norms.behind.pop(id(i), None)
        if joined is not None:
            self.append(computed(i, joined, context))
            return
        outside = {context.slot(x): x for x in (*i.reads, *i.outputs) if context.has_buffer(x)}
        given, borders = set(context.bound), {*i.inputs, *i.outputs}
        last = {name: j for j in i.body for name in (*j.reads, *j.outputs) if name not in borders}
        # One call and views of it gain nothing, and run by itself it is known how its result lies.
        is_fused = context.fuse is not None and sum(map(_works, i.body)) > 1
        # a compiled function is for one number of rows
        is_fused = is_fused and not any(map(context.is_counted, (*i.reads, *i.outputs)))
        context.in_unit = is_fused
        for j in i.body:
            self.why = context.host_values.why_eager(j)
            self.append(local_step(j, context))
            gone = [n for n, user in last.items() if user is j and n not in given]
            if gone:
                self.drop([self.release(n) for n in gone], f"launch {i.fn}")
        context.in_unit = False
        if context.fuse is not None and is_fused:
            steps = self.steps[start:]
            self.steps[start:] = context.fuse(i, steps, outside, context)


def computed(i: Instruction, lines: tuple[Line, ...], context: Context) -> PlanStep:
    """Return the step of a unit that the post before it has computed, but for some calls."""
    inputs, outputs = (tuple(map(context.slot, x)) for x in (i.reads, i.outputs))
    return PlanStep(lines=lines, label=label(i), op="joined", inputs=inputs, outputs=outputs)


def _works(i: Instruction) -> bool:
    """Tell whether an instruction reads elements: it is neither a view nor a creation."""
    row, op = row_of(i), op_of(i)
    return not (row is not None and row.is_view) and not (op is not None and op.is_creation)


#: Ops that put no work on the device.
_ON_HOST = (*MEMORY, *PURE_VIEWS)


def _following(instructions: Sequence[Instruction], n: int) -> Instruction | None:
    """Return the next instruction that puts work on the device; None where there is none."""
    later = (i for i in instructions[n + 1 :] if i.op not in _ON_HOST or "fill" in i.kwargs)
    return next(later, None)


def local_step(i: Instruction, context: Context) -> PlanStep:
    """Return the step of an instruction without communication."""
    inputs = tuple(context.slot(x) for x in i.reads)
    name = i.outputs[0]
    is_bound = context.has_buffer(name)
    lines = tuple(_prepared(i, context))
    for output in i.outputs:
        context.bind_name(output, None if is_bound else shared_operand(i))
    if i.op == "alloc" and not is_bound:
        context.allocated[name] = i.kwargs.get("memory", "device")
    if i.fn == "expand":
        context.expanded[name] = _expanded_dims(i, context)
    outputs = tuple(context.slot(output) for output in i.outputs)
    op = "fill" if "fill" in i.kwargs else i.op  # work, while an alloc is the host's alone
    return PlanStep(lines=lines, label=label(i), op=op, outputs=outputs, inputs=inputs)


def _prepared(i: Instruction, context: Context) -> list[Line]:
    if i.op == "alloc":
        return counted_steps.alloc(i, context) if i.reads else allocate(i, context)
    if i.fn in ops.TABLE:
        lines = compute(i, context)
        return lines if context.checks is None else context.checks.checked(i, lines, context)
    return buffer_ops.prepared(i, context)


def _expanded_dims(i: Instruction, context: Context) -> tuple[int, ...]:
    """Return the dims of an expand's result that have one element in memory."""
    before, after = context.local(i.reads[0]), context.local(i.outputs[0])
    new = len(after) - len(before)
    return tuple(d for d in range(len(after)) if d < new or before[d - new] != after[d])
