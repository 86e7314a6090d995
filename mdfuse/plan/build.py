"""Plans: a host program specialised for one rank and one kind of arguments, as prepared calls.

Building decides everything that does not depend on data: loops are written out, branches taken,
streams and peers known, the buffers that the caller never sees are made. The rest is a flat list of
calls, written down as one function (`mdfuse.plan.lines`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import Poster
from mdfuse.errors import ProgramError
from mdfuse.hir.analysis.clobbers import updated_names
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import as_run
from mdfuse.interpreter.garbage import no_collection
from mdfuse.layouts.call import Call
from mdfuse.plan.arena import Arena, arena
from mdfuse.plan.build_steps import Builder
from mdfuse.plan.context import CALLER_SLOT, Context, Fuse, PlanStep
from mdfuse.plan.index_checks import IndexChecks
from mdfuse.plan.lines import Function, Line, SlotRef, Slots, Stamping, write
from mdfuse.plan.owned_memory import Owned, in_place, owned_by_plan
from mdfuse.plan.posting import Posts
from mdfuse.runtime.watch.plan_position import RunCount, register

__all__ = ["Context", "Plan", "PlanStep", "build"]


@dataclass(frozen=True)
class Plan:
    """The prepared calls of one rank, for arguments of one kind.

    Attributes:
        name: of the program.
        size: how many slots there are.
        names: slot -> the name of its buffer or handle in the program, for readers.
        inputs: the slots of the inputs.
        given: for each output the slot of the caller's buffer, where there is one.
        outputs: the slots of the outputs; None for those that this rank does not compute.
        steps: the prepared calls, in order.
        device: where it computes.
        switches: whether it changes the current stream.
        one_stream: everything runs on the stream that is current when a run starts.
        program: written out for the rank; steps name its instructions by their numbers.
        numbers: whether some inputs are numbers.
        may_overlap: whether it writes into the caller's buffers, which then may overlap others.
        written: the slots of inputs that it writes into.
        records: whether one of the caller's tensors requires a gradient.
        tally: how often its program ran.
        stamping: the calls that its function makes between its lines; None: no calls.
        arena: the bytes in which symmetric buffers lie, in all runs; None: there are none.
    """

    name: str
    size: int
    names: Mapping[int, str]
    inputs: tuple[int, ...]
    given: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    steps: tuple[PlanStep, ...]
    device: torch.device
    switches: bool
    one_stream: bool
    program: HostProgram
    numbers: bool = False
    may_overlap: bool = False
    written: tuple[int, ...] = ()
    records: bool = False
    tally: RunCount | None = None
    stamping: Stamping | None = None
    arena: Tensor | None = None

    # -- step by step, as the simulator goes -----------------------------------------------------

    def start(self, arguments: Sequence[Any], out: Sequence[Any] | None = None) -> Slots:
        """Return fresh slots with the caller's buffers in them."""
        slots: Slots = [None] * self.size
        for slot, argument in zip(self.inputs, arguments, strict=True):
            slots[slot] = argument
        for place, buffer in zip(self.given, out or (), strict=False):
            if place is not None:
                slots[place] = buffer
        return slots

    def finish(self, slots: Slots) -> list[Any]:
        """Return the outputs that the slots hold."""
        return [None if slot is None else slots[slot] for slot in self.outputs]

    # -- at once ---------------------------------------------------------------------------------

    @property
    def quick(self) -> None:
        """The run by one graph alone, if there is one; `GraphPlan` has it."""
        return None

    @property
    def parameters(self) -> tuple[int, ...]:
        """The slots that the caller fills: those of the inputs, then of the given outputs."""
        return (*self.inputs, *(slot for slot in self.given if slot is not None))

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """All calls, in order; results that may take the place of an operand do so."""
        lines = tuple(line for step in self.steps for line in step.lines)
        return in_place(lines, self.outputs) if self.one_stream else lines

    @cached_property
    def owned(self) -> Owned:
        """The buffers that are the same in all runs, and the calls that are left for each run."""
        if self.one_stream:
            return owned_by_plan(self.lines, self.outputs, self.device)
        numbers = tuple(range(len(self.lines)))
        return Owned(buffers={}, lines=self.lines, numbers=numbers, nbytes=0)

    @property
    def lines_of_run(self) -> tuple[int, ...]:
        """For each call that is left, its number among all lines."""
        return self.owned.numbers

    @cached_property
    def function(self) -> Function:
        """The calls left, as a function of the caller's stream, inputs and given outputs."""
        function = write(
            self.name,
            self.owned.lines,
            [CALLER_SLOT, *self.parameters],
            self.outputs,
            self.owned.buffers,
            self.names,
            [self.labels[n] for n in self.lines_of_run],
            self.stamping,
        )
        register(function.code.co_filename, self)
        return function

    def __str__(self) -> str:
        """The calls of a run, as the function that makes them."""
        return self.function.source.rstrip()

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """For each of all lines, the label of its step."""
        return tuple(step.label for step in self.steps for _ in step.lines)

    def run(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None = None,
        at: Sequence[int] | None = None,
    ) -> list[Any]:
        """Run from start to end on a backend whose waits block.

        Nothing is recorded for autograd, which knows no writes into given buffers: a run that would
        need it was refused.

        Args:
            arguments: local tensors, None for those that this rank lacks, numbers for scalars.
            out: the caller's buffers for outputs, None for those without; None: there are none.
            at: where the arguments lie, which only graphs ask.

        Returns:
            The local outputs; None for those that this rank does not compute.
        """
        if out is not None:
            arguments = [*arguments, *self.taken(out)]
        if self.records:
            with torch.no_grad():
                return self.call(arguments)
        return self.call(arguments)

    def taken(self, out: Sequence[Any]) -> list[Any]:
        """Return the caller's buffers that have a slot."""
        return [x for x, slot in zip(out, self.given, strict=True) if slot is not None]

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Run on the values of the inputs and of the given outputs, in this order."""
        caller = torch.cuda.current_stream(self.device) if self.switches else None
        try:
            return self.function.call(caller, *values)
        except Exception as error:
            raise self.explained(error, self.function) from error.__cause__
        finally:
            if caller is not None:  # also after an error, it is current again
                torch.cuda.set_stream(caller)

    def addresses(self, arguments: Sequence[Any], out: Sequence[Any] | None) -> dict[int, int]:
        """Return slot -> address of each tensor that the caller passes."""
        values = [*arguments, *(self.taken(out) if out is not None else ())]
        pairs = zip(self.parameters, values, strict=True)
        return {slot: x.data_ptr() for slot, x in pairs if isinstance(x, Tensor)}

    def release(self) -> None:
        """Give up the owned buffers; the next run makes them again."""
        self.__dict__.pop("owned", None)
        self.__dict__.pop("function", None)

    def explained(self, error: Exception, function: Function, first: int = 0) -> Exception:
        """Return an error that says which instruction it comes from.

        The function's first line is line `first` of those that a run makes.
        """
        at = function.line_of(error.__traceback__)
        if at is None or first + at >= len(self.lines_of_run):
            return error
        number = self.lines_of_run[first + at]
        line, step = self.lines[number], self.steps[self.step_number_of(number)]
        if line.explain is not None:
            explained = line.explain(error)
            if explained is not error:
                explained.__cause__ = error
                error = explained
        error.add_note(f"in {step.label}")
        return error

    def step_number_of(self, line: int) -> int:
        """Return the number of the step that a line belongs to."""
        for number, step in enumerate(self.steps):
            line -= len(step.lines)
            if line < 0:
                return number
        raise IndexError(line)


@no_collection()
def build(
    program: HostProgram,
    bind: Callable[[Call], Poster],
    device: torch.device,
    poison: bool,
    arguments: Sequence[Any] | None = None,
    out: Sequence[Any] | None = None,
    is_simulated: bool = False,
    caller: int = 0,
    tally: RunCount | None = None,
    checks: IndexChecks | None = None,
    fuse: Fuse | None = None,
    memory: Callable[[int], Tensor | None] | None = None,
) -> Plan:
    """Prepare the calls of a projected program.

    Args:
        program: the projection onto a rank.
        bind: prepares a call on a backend whose teams are made.
        device: where its buffers lie.
        poison: fill new buffers with NaN or the largest value.
        arguments: the arguments of the run; runs with others of the same shapes and strides may
            follow. None: only their shapes are known.
        out: likewise the caller's buffers for outputs, None for those without.
        is_simulated: streams are those of the simulator, on any device.
        caller: the handle of the caller's CUDA stream.
        tally: how often the program ran.
        checks, fuse: see `Context`.
        memory: returns bytes that other ranks see, the same each time; None: of no buffer.

    Raises:
        ProgramError: an instruction of it means nothing on this rank.
    """
    if program.rank is None:
        raise ProgramError("a plan is for one rank", hint="project the program first")
    written, arguments, out = as_run(program), arguments or (), out or ()
    has_streams = device.type == "cuda" and not is_simulated
    context = Context(
        written, program.rank, {}, bind, device, poison, has_streams,
        one_stream=not any(i.op == "set_stream" for i in written.instructions),
        caller=caller, stream=caller, checks=checks, fuse=fuse,
    )  # fmt: skip
    whole, context.symmetric = _arena(written, memory)
    inputs = _inputs(context, arguments)
    context.updated = updated_names(written)
    given = _given(context, out)
    builder = Builder(context, Posts(context))
    builder.build(written.instructions)
    outputs = [context.slot(n) if written.has(n, program.rank) else None for n in written.outputs]
    _fill_given(builder, given, outputs)
    _part_outputs(builder, given, outputs)
    return Plan(
        program.name, context.size, context.names, inputs, tuple(given), tuple(outputs),
        tuple(builder.steps), device, builder.switches, context.one_stream, written,
        numbers=any(program.types[n].layout is None for n in program.inputs),
        may_overlap=bool(program.aliases) or any(x is not None for x in given),
        written=tuple(context.slot(n) for n in program.inputs if n in program.written_inputs),
        records=any(isinstance(x, Tensor) and x.requires_grad for x in (*arguments, *out)),
        tally=tally, arena=whole,
    )  # fmt: skip


def _arena(
    program: HostProgram, memory: Callable[[int], Tensor | None] | None
) -> tuple[Tensor | None, Iterator[Tensor | None]]:
    """Return the arena, and the memory of each symmetric buffer: the arena from where it begins."""
    packed = arena(program) if memory is not None else Arena((), 0)
    whole = memory(packed.size) if memory is not None and packed.size else None
    offsets = packed.offsets if whole is not None else repeat(None)
    return whole, (None if whole is None or at is None else whole[at:] for at in offsets)


def _inputs(context: Context, arguments: Sequence[Any]) -> tuple[int, ...]:
    """Return the slots of the inputs, which are bound from the start."""
    program = context.program
    context.bound.update(n for n in program.inputs if program.has(n, context.rank))
    for name, x in zip(program.inputs, arguments, strict=False):
        _know(context, name, x)
    return tuple(map(context.slot, program.inputs))


def _know(context: Context, name: str, x: Any) -> None:
    """Note the strides of the caller's tensors."""
    if isinstance(x, Tensor):
        fact = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        context.know(name, fact)


def _given(context: Context, out: Sequence[Any]) -> list[int | None]:
    """Return the slots of the caller's buffers for outputs, which are bound from the start."""
    slots: list[int | None] = []
    for name, buffer in zip(context.program.outputs, out, strict=False):
        is_new = buffer is not None and not context.has_buffer(name)
        if is_new:
            _know(context, name, buffer)
            context.given.add(name)
        place = context.slot(name) if is_new else None
        slots.append(context.new_slot() if buffer is not None and not is_new else place)
    return slots


def _part_outputs(builder: Builder, given: Sequence[int | None], outputs: list[int | None]) -> None:
    """Copy an output that would be a view of another one; views of inputs stay views."""
    context = builder.context
    names = context.program.outputs
    for n, name in enumerate(names):
        slot, root = outputs[n], context.storage.get(name, name)
        is_own = root in context.program.inputs or (n < len(given) and given[n] is not None)
        if slot is None or is_own or not any(context.share(name, x) for x in names[:n]):
            continue
        outputs[n] = copy = context.new_slot()
        line = Line(run="clone", args=(SlotRef(slot),), into=copy)
        builder.steps.append(
            PlanStep(lines=(line,), label="return", op="return", inputs=(slot,), outputs=(copy,))
        )


def _fill_given(builder: Builder, given: Sequence[int | None], outputs: list[int | None]) -> None:
    """Copy an output that is an input, or is given twice, into the caller's buffer."""
    for n, place in enumerate(given):
        result = outputs[n]
        if place is None or result is None or place == result:
            continue
        filled = builder.context.new_slot()
        line = Line(
            run="copy_", args=(SlotRef(place), SlotRef(result)), into=filled, shares=(place,)
        )
        step = PlanStep(
            lines=(line,), label="return", op="return", inputs=(place, result), outputs=(filled,)
        )
        builder.steps.append(step)
        outputs[n] = filled
