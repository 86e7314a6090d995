"""Compile the calls of a host unit into one.

The calls of a unit are prepared so that torch makes every result which has no buffer yet. Views
that are used outside come behind the unit, and what is left is traced and compiled as one function
of the tensors that the unit reads and writes.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mdfuse.caching import Cache
from mdfuse.errors import ProgramError
from mdfuse.hir.instructions import is_library
from mdfuse.hir.program import Instruction
from mdfuse.plan import inductor
from mdfuse.plan.context import Context, Step, label
from mdfuse.plan.forms import Form
from mdfuse.plan.lines import Line, SlotRef, drop


class Refusal(Exception):
    """Why a unit is not compiled."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """The calls of a unit, cut into what comes in and behind the compiled function.

    Attributes:
        inside: calls to compile.
        behind: views of what the unit makes, and a library's calls that fill buffers.
        takes: the slots that the compiled function reads or writes.
        makes: the slots of its results.
    """

    inside: tuple[Line, ...]
    behind: tuple[Line, ...]
    takes: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(eq=False)
class Fuser:
    """Compiles the host units of a program; what cannot be compiled stays as it is.

    Attributes:
        must: a unit that cannot be compiled is an error.
        refused: unit -> why it runs eagerly.
    """

    must: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    def __call__(
        self, i: Instruction, steps: Sequence[Step], outside: Mapping[int, str], context: Context
    ) -> list[Step]:
        """Return the steps of a unit with its work in one call; see `mdfuse.plan.context.Fuse`."""
        lines = [line for step in steps if step.op != "keep" for line in step.lines]
        if sum(map(_works, lines)) < 2:
            return list(steps)
        self.refused.pop(i.fn, None)
        try:
            return self.fused(i, steps, lines, outside, context)
        except Refusal as refusal:
            self.refused[i.fn] = str(refusal)
            if self.must:
                raise ProgramError(
                    f"launch {i.fn} of @{context.program.name} cannot be compiled: {refusal}",
                    where=context.where(i),
                    because='compile="always"',
                    hint='compile="auto" runs it eagerly',
                ) from refusal
            return list(steps)

    def fused(
        self,
        i: Instruction,
        steps: Sequence[Step],
        lines: Sequence[Line],
        outside: Mapping[int, str],
        context: Context,
    ) -> list[Step]:
        if why := next((step.eager for step in steps if step.eager is not None), None):
            raise Refusal(why)
        if context.checks is not None:
            raise Refusal("indices are checked")
        kept = {context.slot(x) for x in i.outputs}
        cut = _cut(lines, kept, _written_last(i, outside, context))
        if sum(map(_works, cut.inside)) < 2:
            return list(steps)
        forms = _forms(cut, outside, context)
        function, results = self.compiled(cut, forms)
        _learn(dict(zip(cut.makes, results, strict=True)), i, context)
        call = Line(
            run=function,
            args=tuple(map(SlotRef, cut.takes)),
            into=cut.makes or None,
            makes=sum(map(_nbytes, results)),
        )
        gone = [s for s in cut.makes if s not in kept]
        behind = (*cut.behind, drop(*gone)) if gone else cut.behind
        step = Step(
            lines=(call, *behind),
            label=f"launch {i.fn}, {label(i)}",
            op="launch",
            inputs=tuple(context.slot(x) for x in i.reads),
            outputs=tuple(context.slot(x) for x in i.outputs),
            stream=steps[0].stream,
        )
        return [step, *(step for step in steps if step.op == "keep")]

    def compiled(self, cut: _Cut, forms: Sequence[Form]) -> tuple[Any, list[Form]]:
        """Return the compiled function of a cut, and the forms of its results."""
        key = (*forms, *_key(cut))
        found = _COMPILED.get(key)
        if found is None:
            found = _compiled(cut, forms)
            _COMPILED.put(key, found)
        if isinstance(found, Refusal):
            raise found
        return found


#: What is computed, and on what -> the compiled function and the forms of its results, or why there
#: is none. Equal layers have equal units, in one program or in several.
_COMPILED: Cache[tuple[inductor.Function, list[Form]] | Refusal] = Cache(1024)


def _compiled(cut: _Cut, forms: Sequence[Form]) -> tuple[inductor.Function, list[Form]] | Refusal:
    try:
        return inductor.compiled(partial(_run, cut), forms)
    except Exception as error:  # it has many reasons; without it the eager calls are right
        first = str(error).strip().splitlines() or [""]
        return Refusal(f"{type(error).__name__}: {first[0]}")


def _run(cut: _Cut, *values: Any) -> list[Any]:
    slots: dict[int, Any] = dict(zip(cut.takes, values, strict=True))
    for line in cut.inside:
        line(slots)
    return [slots[slot] for slot in cut.makes]


def _works(line: Line) -> bool:
    """Tell whether a call may put work on the device."""
    return line.run is not None and line.new is None and not line.is_view


def _written_last(i: Instruction, outside: Mapping[int, str], context: Context) -> set[int]:
    """Return the buffers that a library fills with what the unit does not read.

    It writes there itself; a compiler would give it a buffer, and copy.
    """
    read = {x for j in i.body for x in j.reads}
    found = {context.slot(x) for j in i.body if is_library(j) for x in j.outputs if x not in read}
    return found.intersection(outside)


def _cut(lines: Sequence[Line], kept: set[int], last: set[int]) -> _Cut:
    """Cut the calls of a unit.

    Args:
        lines: the calls.
        kept: the slots that are used outside.
        last: those that are filled behind the compiled function.

    Raises:
        Refusal: a result may share memory with something else, or not: nobody knows.
    """
    needed = set(kept)
    behind: list[Line] = []
    filling: list[Line] = []
    for line in reversed(lines):
        if line.run is None:
            continue
        if line.is_view and needed.intersection(line.targets):
            behind.append(line)
            needed.update(line.refs)
        elif any(_reads(_target(line), slot) for slot in last):
            filling.append(line)
            needed.update(line.refs)
    inside = [line for line in lines if line.run is not None and line not in filling]
    made = {slot for line in inside for slot in line.targets}
    takes = dict.fromkeys(s for line in inside for s in line.refs if s not in made)
    makes = [slot for line in inside if not line.is_view for slot in line.targets if slot in needed]
    if any(_is_overwritten(slot, inside) for slot in takes):
        raise Refusal("a value is read and written over")
    if not _are_apart(inside, set(takes), makes):
        raise Refusal("a result may share memory with an operand, or with another result")
    return _Cut(tuple(inside), (*behind[::-1], *filling[::-1]), tuple(takes), tuple(makes))


def _is_overwritten(slot: int, inside: Sequence[Line]) -> bool:
    """Tell whether calls read what a buffer holds before, and write into it."""
    using = [line for line in inside if slot in line.refs]
    writing = [line for line in using if _reads(_target(line), slot)]
    if not writing:
        return False
    first = writing[0]
    values = [*first.args, *(x for _, x in first.kwargs)]
    return using[0] is not first or sum(_reads(x, slot) for x in values) > 1


def _target(line: Line) -> Any:
    """Return the argument that a call writes into; None where it makes its result."""
    return None if line.targets else dict(line.kwargs).get("out", line.args[0])


def _reads(x: Any, slot: int) -> bool:
    return any(_reads(y, slot) for y in x) if isinstance(x, list) else x == SlotRef(slot)


def _are_apart(inside: Sequence[Line], takes: set[int], makes: Sequence[int]) -> bool:
    """Tell whether each result has memory of its own."""
    bases: dict[int, frozenset[int]] = {slot: frozenset({slot}) for slot in takes}
    for line in inside:
        shared = frozenset().union(*(bases[slot] for slot in line.shares))
        for slot in line.targets:
            bases[slot] = shared or frozenset({slot})
    found = [base for slot in makes for base in bases[slot]]
    return len(set(found)) == len(found) and takes.isdisjoint(found)


def _forms(cut: _Cut, outside: Mapping[int, str], context: Context) -> list[Form]:
    """Return the forms of what the compiled function takes."""
    forms: list[Form] = []
    for slot in cut.takes:
        fact = context.fact(outside[slot])
        if fact is None:
            raise Refusal("the strides of an operand are not known")
        if not context.is_on_device(outside[slot]):
            raise Refusal("an operand lies in host memory")
        forms.append((tuple(fact.shape), tuple(fact.stride()), fact.dtype, context.device))
    memory = {slot: context.storage.get(n, n) for slot, n in outside.items() if slot in cut.takes}
    shared = Counter(memory.values())
    written = [slot for slot in memory if any(_reads(_target(x), slot) for x in cut.inside)]
    if any(shared[memory[slot]] > 1 for slot in written):
        raise Refusal("operands share memory that is written")
    return forms


def _learn(forms: Mapping[int, Form], i: Instruction, context: Context) -> None:
    """Check the results against their types, and note their strides."""
    for name in i.outputs:
        shape, strides, dtype, _ = forms.get(context.slot(name), (None, (), None, None))
        if shape is None:
            continue
        if (shape, dtype) != (context.local(name), context.type(name).dtype):
            raise Refusal(f"%{name} would be {dtype}{list(shape)}")
        context.know(name, torch.empty_strided(shape, strides, dtype=dtype, device="meta"))


def _nbytes(form: Form) -> int:
    shape, strides, dtype, _ = form
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * dtype.itemsize


# -- equal units -----------------------------------------------------------------------------------


def _key(cut: _Cut) -> tuple[Hashable, ...]:
    """Return what the calls compute, with their slots numbered in order of use."""
    numbers: dict[int, int] = {}

    def number(slot: int) -> int:
        return numbers.setdefault(slot, len(numbers))

    for slot in cut.takes:
        number(slot)
    found: list[Hashable] = []
    for line in cut.inside:
        args = tuple(_value(x, number) for x in line.args)
        kwargs = tuple((k, _value(x, number)) for k, x in line.kwargs)
        found.append((_value(line.run, number), args, kwargs, tuple(map(number, line.targets))))
    return (*found, tuple(map(number, cut.makes)))


def _value(x: Any, number: Callable[[int], int]) -> Hashable:
    """Return what is equal for equal arguments, and for functions that do the same."""
    match x:
        case SlotRef():
            return "slot", number(x.slot), x.form
        case list() | tuple():
            return type(x).__name__, *(_value(y, number) for y in x)
        case dict():
            return "dict", *((k, _value(y, number)) for k, y in x.items())
        case partial():
            return (
                "partial",
                _value(x.func, number),
                _value(x.args, number),
                _value(x.keywords, number),
            )
        case types.FunctionType():
            cells = [cell.cell_contents for cell in x.__closure__ or ()]
            given = x.__defaults__, x.__kwdefaults__
            return x.__module__, x.__code__, _value(cells, number), _value(given, number)
        case float():
            return "float", x.hex()
        case bool() | int() | str() | None:
            return type(x).__name__, x
        case _:
            return _Same(x)


@dataclass(frozen=True, slots=True)
class _Same:
    """An object that equals only itself; a dtype or device also what it says is equal."""

    of: Any

    def __hash__(self) -> int:
        return hash(self.of) if isinstance(self.of, Hashable) else id(self.of)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        if self.of is other.of:
            return True
        return isinstance(self.of, torch.dtype | torch.device) and self.of == other.of
