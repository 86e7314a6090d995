"""Compile the calls of a host unit into one.

The calls of a unit are prepared so that torch makes every result which has no buffer yet. Views
that are used outside come behind the unit. The other calls are traced and compiled as one function
of the tensors that the unit reads and writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import ProgramError
from mdfuse.hir.instructions import is_library
from mdfuse.hir.program import Instruction
from mdfuse.plan import compilation
from mdfuse.plan.boxed_args import freeing
from mdfuse.plan.compilation import Made, Tally, complete
from mdfuse.plan.compiled_functions import AsTold
from mdfuse.plan.context import Context, PlanStep, label
from mdfuse.plan.dynamic_shapes import Lengths
from mdfuse.plan.inductor import Function
from mdfuse.plan.lines import Line, SlotRef, drop
from mdfuse.plan.many_lengths import Calls
from mdfuse.plan.tensor_meta import Form
from mdfuse.plan.unit_keys import unit_key

#: How many functions of a unit are compiled for a program: where lengths change from run to run and
#: no function serves many of them, that would take longer than the calls one by one.
MOST = 8

#: How many units `Fuser.report_lines` names for one reason.
_TOLD = 8


class Refusal(Exception):
    """Why a unit is not compiled."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """The calls of a unit, cut into those in front of the compiled function, in it and behind.

    Attributes:
        ahead: calls that fill buffers with a number.
        inside: calls to compile.
        behind: views of results of the unit, and a library's calls that fill buffers.
        takes: the slots that the compiled function reads or writes.
        makes: the slots of its results.
    """

    ahead: tuple[Line, ...]
    inside: tuple[Line, ...]
    behind: tuple[Line, ...]
    takes: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _PendingUnit:
    """A unit whose function is not compiled yet.

    Attributes:
        step: calls the function.
        compiled: the function.
        instruction: the unit.
        steps: its calls one by one.
    """

    step: PlanStep
    compiled: Made
    instruction: Instruction
    steps: tuple[PlanStep, ...]


@dataclass(eq=False)
class Fuser:
    """Compiles the host units of a program; units that cannot be compiled stay as they are.

    Attributes:
        must: a unit that cannot be compiled is an error.
        timeout_s: how long to wait for another process that compiles.
        lengths: the functions compiled for all shapes of the program.
        refused: unit -> the reason why it runs eagerly.
        tally: counts the functions by their origin.
    """

    must: bool = False
    timeout_s: float = inf
    lengths: Lengths = field(default_factory=Lengths)
    refused: dict[str, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    _held: dict[int, _PendingUnit] = field(default_factory=dict)

    def __call__(
        self,
        i: Instruction,
        steps: Sequence[PlanStep],
        outside: Mapping[int, str],
        context: Context,
    ) -> list[PlanStep]:
        """Return the steps of a unit with its work in one call; see `mdfuse.plan.context.Fuse`."""
        lines = [line for step in steps if step.op != "keep" for line in step.lines]
        if sum(map(_works, lines)) < 2:
            return list(steps)
        self.refused.pop(i.fn, None)
        try:
            return self.fused(i, steps, lines, outside, context)
        except Refusal as refusal:
            why = str(refusal)
        self.refuse(i, why, context)
        return list(steps)

    def refuse(self, i: Instruction, why: str, context: Context) -> None:
        """Note why a unit runs eagerly.

        Raises:
            ProgramError: it must not.
        """
        self.refused[i.fn] = why
        if self.must:
            raise ProgramError(
                f"launch {i.fn} of @{context.program.name} cannot be compiled: {why}",
                where=context.where(i),
                because='compile="always"',
                hint='compile="auto" runs it eagerly',
            )

    def fused(
        self,
        i: Instruction,
        steps: Sequence[PlanStep],
        lines: Sequence[Line],
        outside: Mapping[int, str],
        context: Context,
    ) -> list[PlanStep]:
        if why := next((step.eager for step in steps if step.eager is not None), None):
            raise Refusal(why)
        if context.checks is not None:
            raise Refusal("indices are checked")
        outputs = {context.slot(x) for x in i.outputs}
        cut = _cut(lines, outputs, _written_last(i, outside, context))
        if sum(map(_works, cut.inside)) < 2:
            return list(steps)
        dense = {slot: context.new_slot() for slot in _unknown(cut, outside, context)}
        compiled = self.function_of(i, cut, _forms(cut, outside, context))
        _learn(_facts(cut, compiled.results, outside, context), i, context)
        before = [
            Line(run="contiguous", args=(SlotRef(slot),), into=new, shares=(slot,))
            for slot, new in dense.items()
        ]
        call = Line(
            run=_not_compiled
            if compiled.function is None
            else _called(compiled, compiled.function),
            args=tuple(SlotRef(dense.get(slot, slot)) for slot in cut.takes),
            into=cut.makes or None,
            makes=sum(map(_nbytes, compiled.results)),
        )
        around = chain.from_iterable(line.targets for line in (*cut.ahead, *cut.behind))
        gone = [*dense.values(), *(s for s in (*cut.makes, *around) if s not in outputs)]
        behind = (*cut.behind, drop(*gone)) if gone else cut.behind
        step = PlanStep(
            lines=(*before, *cut.ahead, call, *behind),
            label=f"launch {i.fn}, {label(i)}",
            op="launch",
            inputs=tuple(context.slot(x) for x in i.reads),
            outputs=tuple(context.slot(x) for x in i.outputs),
            stream=steps[0].stream,
            instruction=steps[0].instruction,
        )
        if not compiled.is_done:
            eager = tuple(s for s in steps if s.op != "keep")
            self._held[id(step)] = _PendingUnit(step, compiled, i, eager)
        return [step, *(step for step in steps if step.op == "keep")]

    def function_of(self, i: Instruction, cut: _Cut, forms: Sequence[Form]) -> Made:
        """Return the function of a cut, which is compiled now or will be with all others."""
        calls = Calls(cut.inside, cut.takes, cut.makes, tuple(forms))
        key = unit_key(cut.inside, cut.takes, cut.makes)
        function = compilation.known(key, forms, self.tally)
        if function is None:
            function = self.lengths.served(i.fn, key, calls)
            self.tally.shared += function is not None
        if function is None:
            if self.lengths.counts[i.fn] >= MOST and not self.must:
                raise Refusal(f"it was compiled for {MOST} other shapes")
            function = self.lengths.added(i.fn, key, calls)
        if function.refused is not None:
            raise Refusal(function.refused)
        return function

    def finish(self, steps: Sequence[PlanStep], context: Context) -> list[PlanStep]:
        """Compile the functions of a plan's units, and return its steps with them."""
        held, self._held = self._held, {}
        pending = {n: held[n] for n in map(id, steps) if n in held}
        functions = [x.compiled for x in pending.values()]
        count = sum(1 for _ in context.program.walk())
        late = complete(functions, self.timeout_s, context.rank == 0, self.tally, count)
        done: list[PlanStep] = []
        for step in steps:
            waiting = pending.get(id(step))
            done += [step] if waiting is None else self.finished(waiting, late, context)
        return freeing(done, context)

    def finished(
        self, held: _PendingUnit, late: Sequence[Made], context: Context
    ) -> Sequence[PlanStep]:
        """Return the steps of a unit whose function is there, or those of its calls."""
        function, why = held.compiled.function, held.compiled.refused
        if held.compiled in late:
            why = f"another process has compiled it for longer than timeout_s={self.timeout_s:g}"
        if function is None or why is not None:
            self.refuse(held.instruction, why or "", context)
            return held.steps
        lines, run = held.step.lines, _called(held.compiled, function)
        called = (replace(x, run=run) if x.run is _not_compiled else x for x in lines)
        return [replace(held.step, lines=tuple(called))]

    def report_lines(self) -> Iterator[str]:
        """Yield the lines of a report on compiled and eager units."""
        yield from self.tally.report_lines()
        reasons: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            others = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
            run = "runs" if len(names) == 1 else "run"
            yield f"{', '.join(names[:_TOLD])}{others}: {run} eagerly, {why}"


def _called(unit: Made, function: Function) -> AsTold:
    """Return the function that a step calls; later calls rely on the known strides."""
    _, strides, dtypes, _ = zip(*unit.results, strict=True) if unit.results else ((),) * 4
    return AsTold(function, strides, dtypes)


def _not_compiled(*_: Any) -> Any:
    raise AssertionError("a plan is finished before it runs")


def _works(line: Line) -> bool:
    """Tell whether a call may put work on the device."""
    return line.run is not None and line.new is None and not line.is_view


def _written_last(i: Instruction, outside: Mapping[int, str], context: Context) -> set[int]:
    """Return the buffers that a library fills with values that the unit does not read.

    The library writes there itself; a compiler would give it another buffer, and copy.
    """
    read = {x for j in i.body for x in j.reads if j.op != "addmm" or x not in j.outputs}
    filled = {context.slot(x) for j in i.body if is_library(j) for x in j.outputs if x not in read}
    return filled.intersection(outside)


def _cut(
    lines: Sequence[Line], outside: set[int], last: set[int], *, are_shared: bool = False
) -> _Cut:
    """Cut the calls of a unit.

    Args:
        lines: the calls.
        outside: the slots that are used outside.
        last: those that are filled behind the compiled function.
        are_shared: results that may share memory come behind it, as views do. Nothing writes there
            later: results in memory that is written again would be copies (`local_ops.ordered`).

    Raises:
        Refusal: it is not known whether a result shares memory with another value.
    """
    needed = set(outside)
    behind: list[Line] = []
    filling: list[Line] = []
    for line in reversed(lines):
        if line.run is None:
            continue
        is_behind = line.is_view or (are_shared and line.shares)
        if is_behind and needed.intersection(line.targets):
            behind.append(line)
            needed.update(line.refs)
        elif not last.isdisjoint(_written([line])):
            filling.append(line)
            needed.update(line.refs)
    ahead = _ahead(lines)
    inside = _inside([x for x in lines if x.run and x not in ahead and x not in filling], behind)
    targets = {slot for line in inside for slot in line.targets}
    takes = dict.fromkeys(s for line in inside for s in line.refs if s not in targets)
    is_later = set(map(id, behind))
    works = (line for line in inside if id(line) not in is_later)
    makes = [slot for line in works for slot in line.targets if slot in needed]
    bases = _bases(inside, takes)
    written = takes.keys() & _written(inside)
    behind_it = {base for line in filling for x in line.refs for base in bases.get(x, {x})}
    if not written.isdisjoint(behind_it):
        raise Refusal("a library reads what the unit writes over")
    if not _are_apart([bases[slot] for slot in makes], takes):
        if not are_shared:
            return _cut(lines, outside, last, are_shared=True)
        raise Refusal("a result may share memory with an operand, or with another result")
    last_of_all = (*behind[::-1], *filling[::-1])
    return _Cut(ahead, tuple(inside), last_of_all, tuple(takes), tuple(makes))


def _inside(lines: Iterable[Line], behind: Sequence[Line]) -> list[Line]:
    """Return the calls to compile; calls behind only where a compiled call reads their result.

    Such a result is computed twice, so the compiled function needs no call behind it.
    """
    needed, read, is_later = list[Line](), set[int](), set(map(id, behind))
    for line in reversed([*lines]):
        if id(line) in is_later and read.isdisjoint(line.targets):
            continue
        needed.append(line)
        read.update(line.refs)
    return needed[::-1]


def _ahead(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the calls that fill buffers from outside before any other call uses them.

    Sums over chunks begin so: the functions of all chunks are then one.
    """
    fills, used = list[Line](), set[int]()
    for line in lines:
        if line.run == "fill_" and used.isdisjoint(line.refs):
            fills.append(line)
        used.update((*line.refs, *line.targets))
    return tuple(fills)


def _written(lines: Iterable[Line]) -> set[int]:
    """Return the slots whose memory calls write into, but for results that they make."""
    written = set[int]()
    waiting = [dict(x.kwargs).get("out", x.args[0]) for x in lines if not x.targets]
    while waiting:
        x = waiting.pop()
        if isinstance(x, list):
            waiting += x
        elif isinstance(x, SlotRef) and x.form == "tensor":
            written.add(x.slot)
    return written


def _bases(inside: Sequence[Line], takes: Iterable[int]) -> dict[int, frozenset[int]]:
    """Return for each slot the slots whose memory it may share."""
    bases = {slot: frozenset({slot}) for slot in takes}
    for line in inside:
        shared = frozenset().union(*(bases[slot] for slot in line.shares))
        bases.update((slot, shared or frozenset({slot})) for slot in line.targets)
    return bases


def _are_apart(results: Sequence[frozenset[int]], takes: Iterable[int]) -> bool:
    """Tell whether each result has memory of its own."""
    buffers = [base for bases in results for base in bases]
    return len(set(buffers)) == len(buffers) and set(takes).isdisjoint(buffers)


def _unknown(cut: _Cut, outside: Mapping[int, str], context: Context) -> list[int]:
    """Return the slots of operands whose strides are not known, which are made dense before.

    Most are dense already. Buffers that the unit writes must stay in place.

    Raises:
        Refusal: the unit writes to one of them.
    """
    unknown = [slot for slot in cut.takes if context.fact(outside[slot]) is None]
    if not _written(cut.inside).isdisjoint(unknown):
        raise Refusal("the strides of what it writes to are not known")
    return unknown


def _forms(cut: _Cut, outside: Mapping[int, str], context: Context) -> list[Form]:
    """Return the forms of the compiled function's arguments."""
    forms: list[Form] = []
    for slot in cut.takes:
        name = outside[slot]
        if not context.is_on_device(name):
            raise Refusal("an operand lies in host memory")
        fact = context.fact(name)
        fact = context.dense(name) if fact is None else fact
        forms.append((tuple(fact.shape), tuple(fact.stride()), fact.dtype, context.device))
    memory = {slot: context.storage.get(n, n) for slot, n in outside.items() if slot in cut.takes}
    shared = Counter(memory.values())
    if any(shared[memory[slot]] > 1 for slot in memory.keys() & _written(cut.inside)):
        raise Refusal("operands share memory that is written")
    return forms


def _facts(
    cut: _Cut, results: Sequence[Form], outside: Mapping[int, str], context: Context
) -> dict[int, Tensor]:
    """Return slot -> a meta tensor like the unit's argument, result, or a view of these."""
    facts = ((slot, context.fact(name)) for slot, name in outside.items())
    slots: dict[int, Any] = {slot: fact for slot, fact in facts if fact is not None}
    for slot, (shape, strides, dtype, _) in zip(cut.makes, results, strict=True):
        slots[slot] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    for line in cut.behind:
        if line.is_view and slots.keys() >= {*line.refs}:
            line(slots)
    return slots


def _learn(facts: Mapping[int, Tensor], i: Instruction, context: Context) -> None:
    """Check the results against their types, and note their strides."""
    for name in i.outputs:
        fact = facts.get(context.slot(name))
        if fact is None:
            continue
        if (tuple(fact.shape), fact.dtype) != (context.local(name), context.type(name).dtype):
            raise Refusal(f"%{name} would be {fact.dtype}{list(fact.shape)}")
        context.know(name, fact)


def _nbytes(form: Form) -> int:
    shape, strides, dtype, _ = form
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * dtype.itemsize
