"""Plans: a host program specialised for one rank, as a flat list of prepared calls.

Building decides everything that does not depend on data: loops are written out, branches taken,
streams and peers known. Running walks the list. A slot is a place in one list of tensors, so that
no name is looked up while a program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mdfuse.backends.base import Call, Poster
from mdfuse.errors import ProgramError
from mdfuse.hir.program import HostProgram
from mdfuse.hir.unroll import unroll
from mdfuse.plan.posts import Posts
from mdfuse.plan.slots import Context, Slots, Step, Thunk, updated_names
from mdfuse.plan.steps import Builder

__all__ = ["Context", "Plan", "Step", "build"]


@dataclass(frozen=True)
class Plan:
    """Prepared calls of one rank.

    Attributes:
        size: how many slots.
        inputs: the slots of the inputs.
        outputs: the slots of the outputs; None for what this rank does not compute.
        steps: what to call, in order, with the list of slots.
        caller: the slot of the caller's stream, where the plan switches streams.
        device: whose streams.
    """

    size: int
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    steps: tuple[Step, ...]
    caller: int | None
    device: torch.device

    @cached_property
    def thunks(self) -> tuple[Thunk, ...]:
        """The calls alone."""
        return tuple(step.run for step in self.steps)

    def start(self, arguments: Sequence[Any], out: Sequence[Any] | None = None) -> Slots:
        """Fresh slots with the caller's buffers in them."""
        slots: Slots = [None] * self.size
        for slot, argument in zip(self.inputs, arguments, strict=True):
            slots[slot] = argument
        for place, buffer in zip(self.outputs, out or (), strict=False):
            if place is not None and place not in self.inputs and slots[place] is None:
                slots[place] = buffer
        return slots

    def finish(self, slots: Slots, out: Sequence[Any] | None = None) -> list[Any]:
        """The outputs, in the caller's buffers where there are any."""
        results = [None if slot is None else slots[slot] for slot in self.outputs]
        if out is None:
            return results
        for at, buffer in enumerate(out):  # an output that is an input, or given twice
            if buffer is not None and results[at] is not buffer:
                results[at] = buffer.copy_(results[at])
        return results

    def run(self, arguments: Sequence[Any], out: Sequence[Any] | None = None) -> list[Any]:
        """Run from start to end on a backend whose waits block; nothing is recorded for autograd,
        which knows no writes into given buffers."""
        with torch.no_grad():
            slots = self.start(arguments, out)
            if self.caller is None:
                self._run(slots)
            else:
                self._run_on_streams(slots, self.caller)
            return self.finish(slots, out)

    def _run(self, slots: Slots) -> None:
        try:
            for thunk in self.thunks:
                thunk(slots)
        except Exception as error:
            error.add_note(f"in {self.steps[self.thunks.index(thunk)].label}")
            raise

    def _run_on_streams(self, slots: Slots, caller: int) -> None:
        """Whatever happens, the caller's stream is current again afterwards."""
        slots[caller] = torch.cuda.current_stream(self.device)
        try:
            self._run(slots)
        finally:
            torch.cuda.set_stream(slots[caller])


def build(
    program: HostProgram,
    bind: Callable[[Call], Poster],
    device: torch.device,
    poison: bool,
    is_simulated: bool = False,
) -> Plan:
    """Prepare the calls of a projected program.

    Args:
        program: the projection onto a rank.
        bind: prepares a call on a backend whose teams are made.
        device: where its buffers lie.
        poison: fill new buffers with NaN or the largest value.
        is_simulated: streams are those of the simulator, whatever the device.

    Raises:
        ProgramError: an instruction of it means nothing on this rank.
    """
    if program.rank is None:
        raise ProgramError("a plan is for one rank", hint="project the program first")
    written = unroll(program)
    has_streams = device.type == "cuda" and not is_simulated
    context = Context(written, program.rank, {}, bind, device, poison, has_streams)
    inputs = tuple(context.slot(name) for name in written.inputs)
    context.bound.update(n for n in written.inputs if written.has(n, program.rank))
    context.updated = updated_names(written)
    context.maybe.update(n for n in written.outputs if n not in context.bound)
    builder = Builder(context, Posts(context))
    for instruction in written.instructions:
        builder.add(instruction)
    builder.finish()
    outputs = tuple(
        context.slot(n) if written.has(n, program.rank) else None for n in written.outputs
    )
    size = len(context.slots) + 1
    caller = size - 1 if builder.switches else None
    return Plan(size, inputs, outputs, tuple(builder.steps(size - 1)), caller, device)
