"""The steps of a plan: goes through the instructions, and knows streams and bindings as they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mdfuse.errors import ProgramError
from mdfuse.hir.program import Instruction
from mdfuse.hir.sharing import shared_operand
from mdfuse.ir import ops
from mdfuse.plan import streams
from mdfuse.plan.allocation import allocate
from mdfuse.plan.buffer_ops import BUFFER_OPS
from mdfuse.plan.local_ops import compute
from mdfuse.plan.posts import Posts
from mdfuse.plan.slots import Binding, Context, Slots, Step, Thunk, base_name, label
from mdfuse.plan.streams import CALLER


@dataclass
class Builder:
    """Goes through the instructions and keeps what is known before anything runs.

    Attributes:
        context: the rank's slots and bindings.
        posts: prepares its communications.
        made: the steps, each to be told the slot of the caller's stream.
        handles: values of get_stream -> the stream.
        homes: slot -> the stream that was current when it was bound.
        current: the stream that is current.
        switches: whether there is more than one.
    """

    context: Context
    posts: Posts
    made: list[Callable[[int], Step]] = field(default_factory=list)
    handles: dict[str, int] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    current: int = CALLER
    switches: bool = False

    def steps(self, caller: int) -> list[Step]:
        """The steps, now that the slot of the caller's stream is known."""
        return [make(caller) for make in self.made]

    def add(self, i: Instruction) -> None:
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
            case "post" | "wait" | "send" | "recv" | "barrier" | "group_start" | "group_end":
                for step in self.posts.steps(i):
                    self.append(step)
            case _:
                self.append(local_step(i, self.context))

    def finish(self) -> None:
        """The caller's stream reads the outputs; each that this rank has was computed."""
        context, program = self.context, self.context.program
        self.posts.finish()
        mine = tuple(n for n in program.outputs if program.has(n, context.rank))
        context.check_bound(Instruction(op="return", inputs=mine))
        self.current = CALLER
        self.guard(tuple(map(context.slot, mine)))

    def append(self, step: Step) -> None:
        """Add a step on the current stream."""
        current = self.current
        self.made.append(lambda _: _on(step, current))
        for slot in step.outputs:
            self.homes.setdefault(slot, current)
        self.guard((*step.inputs, *step.outputs))

    # -- streams ---------------------------------------------------------------------------------

    def guard(self, slots: Sequence[int]) -> None:
        """Keep the memory of buffers that were made on another stream than the current one."""
        away = tuple(x for x in slots if self.homes.get(x, self.current) != self.current)
        device, current = self.context.device, self.current
        if away and self.context.has_streams:
            self.made.append(
                lambda caller: Step(
                    run=streams.keep(device, current, away, caller), label="keep", op="keep"
                )
            )

    def switch(self, i: Instruction) -> None:
        self.current = to = self.stream(i)
        device = self.context.device
        if self.context.has_streams:
            self.switches = True
            self.made.append(
                lambda caller: Step(
                    run=streams.switch(device, to, caller),
                    label="set_stream",
                    op="set_stream",
                    stream=to,
                )
            )

    def sync(self, i: Instruction) -> None:
        other, current, device = self.stream(i), self.current, self.context.device
        has_streams = self.context.has_streams
        self.switches = self.switches or has_streams

        def make(caller: int) -> Step:
            run = streams.join(device, current, other, caller) if has_streams else _nothing
            return Step(run=run, label="sync", op="sync", stream=current, joins=other)

        self.made.append(make)

    def stream(self, i: Instruction) -> int:
        """The stream that an instruction names."""
        index = i.kwargs["stream"] if i.attrs else self.handles.get(i.reads[0])
        if isinstance(index, int) and (index >= 0 or not i.attrs):
            return index
        raise ProgramError(
            f"{i.op} {index if i.attrs else '%' + base_name(i.reads[0])}",
            where=self.context.where(i),
            because="a stream is named by a number from 0 on, or by what get_stream gave",
        )

    # -- values ----------------------------------------------------------------------------------

    def free(self, i: Instruction) -> None:
        for name in i.reads:
            self.context.forget(name, i)
        self.drop(i.reads, label(i))

    def drop(self, names: Sequence[str], what: str) -> None:
        """Let go of buffers."""
        slots = tuple(map(self.context.slot, names))
        for slot in slots:
            self.homes.pop(slot, None)
        step = Step(run=_dropped(slots), label=what, op="free", inputs=slots)
        self.made.append(lambda _: step)

    def launch(self, i: Instruction) -> None:
        """A host unit: its expressions in a row, inner values forgotten after their last use."""
        context = self.context
        self.check_unit(i)
        given, kept = set(context.bound), {*i.inputs, *i.outputs}
        last = {name: j for j in i.body for name in (*j.reads, *j.outputs) if name not in kept}
        for j in i.body:
            self.append(local_step(j, context))
            gone = [n for n, user in last.items() if user is j and n not in given]
            if gone:
                context.bound.difference_update(gone)
                self.drop(gone, f"launch {i.fn}")

    def check_unit(self, i: Instruction) -> None:
        """A host unit writes all its outputs into buffers, or none."""
        bindings = {n: self.context.binding(n) for n in i.outputs}
        lacking = [n for n, b in bindings.items() if b is Binding.FRESH]
        if lacking and not self.context.allocated.keys().isdisjoint(i.outputs):
            raise ProgramError(
                f"launch {i.fn}: buffers for some of its outputs, but not for "
                + ", ".join(f"%{base_name(n)}" for n in lacking),
                where=self.context.where(i),
                because="a host unit writes all its outputs into buffers, or none",
                hint="alloc each of them, or none",
            )


def _on(step: Step, stream: int) -> Step:
    return step if stream == CALLER else replace(step, stream=stream)


def _nothing(s: Slots) -> None:
    """What a stream instruction does where there are no streams."""


def _dropped(slots: tuple[int, ...]) -> Thunk:
    if len(slots) == 1:
        (only,) = slots

        def one(s: Slots) -> None:
            s[only] = None

        return one

    def thunk(s: Slots) -> None:
        for slot in slots:
            s[slot] = None

    return thunk


def local_step(i: Instruction, context: Context) -> Step:
    """A step without communication."""
    context.check_bound(i)
    inputs = tuple(context.slot(x) for x in i.reads)
    (name,) = i.outputs
    binding = context.binding(name)
    run = _prepared(i, context, binding)
    context.bind_name(name, shared_operand(i) if binding is not Binding.BOUND else None)
    if i.op == "alloc" and binding is not Binding.BOUND:
        context.allocated[name] = i.kwargs.get("memory", "device")
    if i.fn == "expand":
        context.expanded[name] = _expanded_dims(i, context)
    return Step(run=run, label=label(i), op=i.op, outputs=(context.slot(name),), inputs=inputs)


def _prepared(i: Instruction, context: Context, binding: Binding) -> Thunk:
    if i.op == "alloc":
        return allocate(i, context, binding)
    if i.fn in ops.TABLE:
        return compute(i, context, binding)
    if i.op in BUFFER_OPS:
        return BUFFER_OPS[i.op](i, context, binding)
    raise ProgramError(
        f"there is no instruction {i.fn or i.op!r}",
        where=context.where(i),
        hint="docs/host_ir.md lists the instructions",
    )


def _expanded_dims(i: Instruction, context: Context) -> tuple[int, ...]:
    """The dims of the result of an expand that have one element in memory."""
    before, after = context.local(i.reads[0]), context.local(i.outputs[0])
    new = len(after) - len(before)
    return tuple(d for d in range(len(after)) if d < new or before[d - new] != after[d])
