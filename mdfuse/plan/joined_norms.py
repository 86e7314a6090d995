"""Prepare sums over ranks with the norms of rows behind them as one call of a backend.

The call takes the place of the post; its results are there behind the wait, and the unit that would
compute them has no calls. What is not dense is copied, and a result whose buffer a kernel cannot
write is copied there behind the wait: so all ranks make the same call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mdfuse.backends.base import Joining, Poster, Work
from mdfuse.hir.program import Instruction
from mdfuse.hir.row_norms import NormChain, SumReaders, is_sum, norm_behind
from mdfuse.ir.infer import dense_strides
from mdfuse.plan.allocation import new_buffer
from mdfuse.plan.context import Context, PlanStep
from mdfuse.plan.lines import Line, NewBuffer, SlotRef, drop, is_dense
from mdfuse.plan.pending import Pending


@dataclass(eq=False)
class JoinedNorms:
    """The units of a plan that sums before them may compute.

    Attributes:
        context: the state of the plan.
        units: handle -> the unit behind its wait.
        ahead: the steps to make before the post that was asked for last.
        behind: unit -> the calls that are left in its place.
    """

    context: Context
    units: dict[str, Instruction] = field(default_factory=dict)
    ahead: list[PlanStep] = field(default_factory=list)
    behind: dict[int, tuple[Line, ...]] = field(default_factory=dict)

    def lines(self, i: Instruction, posters: Sequence[Poster]) -> tuple[Line, ...] | None:
        """Return a post as one call with the unit behind it; None where the backend has none."""
        unit = self.units.pop(i.outputs[0], None)
        if unit is None or not is_sum(i) or len(posters) != 1:
            return None
        (poster,) = posters
        if not isinstance(poster, Joining):
            return None
        is_read = self.readers.are_elsewhere(i, unit)
        chain = norm_behind(self.context.program, i, unit, is_read=is_read)
        if chain is None or len(chain.steps) != len(unit.body):
            return None
        read = (i.inputs[0], chain.residual, chain.weight)
        if not all(self.context.is_on_device(x) for x in read if isinstance(x, str)):
            return None
        rows = math.prod(self.context.local(chain.result)[:-1])
        post = poster.joined(chain.norm, rows)
        return None if post is None else self.joined(i, unit, chain, post)

    @cached_property
    def readers(self) -> SumReaders:
        """The readers of the sums."""
        return SumReaders.of(self.context.program)

    def joined(
        self, i: Instruction, unit: Instruction, chain: NormChain, post: Callable[..., Work]
    ) -> tuple[Line, ...]:
        """Return the calls in place of the post; note those in place of the unit."""
        context, behind = self.context, list[Line]()
        given: list[SlotRef | None] = []
        for name in (i.inputs[0], chain.residual, chain.weight):
            given.append(self.operand(name, behind) if isinstance(name, str) else None)
        for name in (chain.total, chain.result):
            given.append(None if name is None else self.result(name, i, chain, behind))

        def post_joined(*buffers: torch.Tensor | None) -> Pending:
            return Pending((post(*buffers),))

        used = tuple([x.slot for x in given if x is not None])
        handle = context.slot(i.outputs[0])
        call = Line(run=post_joined, args=tuple(given), into=handle, shares=used)
        self.behind[id(unit)] = tuple(behind)
        return (call,)

    def operand(self, name: str, behind: list[Line]) -> SlotRef:
        """Return an operand that is dense."""
        context = self.context
        if is_dense(context.fact(name)):
            return context.ref(name)
        slot, new = context.slot(name), context.new_slot()
        line = Line(run="contiguous", args=(SlotRef(slot),), into=new, shares=(slot,))
        self.go_ahead("contiguous", [line], (slot,), new)
        behind.append(drop(new))
        return SlotRef(new)

    def result(self, name: str, i: Instruction, chain: NormChain, behind: list[Line]) -> SlotRef:
        """Return a buffer that the kernel may write a result into."""
        context = self.context
        if not context.has_buffer(name):
            self.go_ahead("alloc", new_buffer(name, None, context), (), context.slot(name))
            context.bind_name(name)
            return context.ref(name)
        read = (x for x in (i.inputs[0], chain.residual, chain.weight) if isinstance(x, str))
        is_free = not any(context.share(name, x) for x in read)
        if is_free and is_dense(context.fact(name)) and context.is_on_device(name):
            return context.ref(name)
        shape, dtype, slot = context.local(name), context.type(name).dtype, context.new_slot()
        strides = dense_strides(shape, None)
        new = NewBuffer(shape=shape, strides=strides, dtype=dtype, device=context.device)
        form = (("dtype", dtype), ("device", context.device))
        run = torch.empty_strided
        line = Line(run=run, args=(shape, strides), kwargs=form, into=slot, new=new)
        self.go_ahead("alloc", [line], (), slot)
        behind += [Line(run="copy_", args=(context.ref(name), SlotRef(slot))), drop(slot)]
        return SlotRef(slot)

    def go_ahead(self, op: str, lines: Sequence[Line], inputs: tuple[int, ...], out: int) -> None:
        """Add a step before the post."""
        self.ahead.append(
            PlanStep(lines=tuple(lines), label=op, op=op, inputs=inputs, outputs=(out,))
        )
