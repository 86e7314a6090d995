"""Plans: a host program specialised for one rank, as a flat list of prepared calls.

Building decides everything that does not depend on data; running walks the list. A slot is a place
in one list of tensors, so that no name is looked up while a program runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import Call, Poster
from mdfuse.errors import ProgramError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir import ops
from mdfuse.ir.graph import Operand
from mdfuse.ir.infer import dense_strides
from mdfuse.layout import nth_chunk, relative
from mdfuse.posts import Context, Slots, Thunk, post, wait


@dataclass(frozen=True, slots=True)
class Plan:
    """Prepared calls of one rank.

    Attributes:
        size: how many slots.
        inputs: the slots of the inputs.
        outputs: the slots of the outputs; None for what this rank does not compute.
        thunks: what to call, in order, with the list of slots.
        waits: position of a thunk that waits -> the slot of what it waits for.
        labels: what each thunk does, for error messages.
    """

    size: int
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    thunks: tuple[Thunk, ...]
    waits: Mapping[int, int]
    labels: tuple[str, ...]

    def start(self, arguments: Sequence[Any]) -> Slots:
        """Fresh slots with the inputs in them."""
        slots: Slots = [None] * self.size
        for slot, argument in zip(self.inputs, arguments, strict=True):
            slots[slot] = argument
        return slots

    def finish(self, slots: Slots) -> list[Any]:
        """The outputs."""
        return [None if slot is None else slots[slot] for slot in self.outputs]

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Run from start to end on a backend whose waits block."""
        slots = self.start(arguments)
        for thunk in self.thunks:
            thunk(slots)
        return self.finish(slots)


def build(
    program: HostProgram, bind: Callable[[Call], Poster], device: torch.device, poison: bool
) -> Plan:
    """Prepare the calls of a projected program.

    Args:
        program: the projection onto a rank.
        bind: prepares a call on a backend whose teams are made.
        device: where its buffers lie.
        poison: fill new buffers with NaN or the largest value.
    """
    rank = program.rank
    if rank is None:
        raise ProgramError("a plan is for one rank", hint="project the program first")
    context = Context(program, rank, {}, bind, device, poison)
    inputs = tuple(context.slot(name) for name in program.inputs)
    thunks: list[Thunk] = []
    labels: list[str] = []
    waits: dict[int, int] = {}
    dying = _last_uses(program)
    for instruction in program.instructions:
        if instruction.op == "return":
            continue
        if instruction.op == "wait":
            waits[len(thunks)] = context.slot(instruction.reads[0])
        thunks.append(_thunk(instruction, context))
        labels.append(str(instruction.source or instruction))
        if dead := dying.get(id(instruction)):
            thunks.append(_drop(tuple(context.slot(n) for n in dead)))
            labels.append("free " + ", ".join(dead))
    outputs = tuple(context.slot(n) if program.has(n, rank) else None for n in program.outputs)
    return Plan(len(context.slots), inputs, outputs, tuple(thunks), waits, tuple(labels))


def _last_uses(program: HostProgram) -> dict[int, tuple[str, ...]]:
    """id of an instruction -> the names that nothing uses after it."""
    last: dict[str, Instruction] = {}
    posted: dict[str, tuple[str, ...]] = {}
    for i in program.instructions:
        names = (*i.reads, *i.outputs)
        if i.op == "post":
            posted[i.outputs[0]] = i.reads
        if i.op == "wait":  # a posted buffer is in use until its wait
            names = (*names, *posted.get(i.reads[0], ()))
        for name in names:
            last[name] = i
    keep = {*program.inputs, *program.outputs}
    dying: dict[int, tuple[str, ...]] = {}
    for name, i in last.items():
        if name not in keep and i.op != "return":
            dying[id(i)] = (*dying.get(id(i), ()), name)
    return dying


def _drop(slots: tuple[int, ...]) -> Thunk:
    def thunk(s: Slots) -> None:
        for slot in slots:
            s[slot] = None

    return thunk


def _thunk(instruction: Instruction, context: Context) -> Thunk:
    if instruction.fn in ops.TABLE and instruction.op != "launch":
        return _compute(instruction, context)
    return _BUILDERS[instruction.op](instruction, context)


# -- local ops -----------------------------------------------------------------------------------


def _compute(instruction: Instruction, context: Context) -> Thunk:
    """A row of the op table on this rank's parts."""
    row = ops.TABLE[instruction.fn]
    (output,) = instruction.outputs
    kind = context.type(output)
    if kind.layout is None:
        return _scalar(instruction, row, context)
    target = context.slot(output)
    shape = context.local(output)
    if math.prod(shape) == 0:
        return _allocate(target, shape, kind.dtype, context)
    attrs = dict(instruction.attrs)
    if row.name == "uniform":
        attrs["device"] = context.device
    call = partial(row.call, **attrs) if attrs else row.call
    get = _getters(instruction.inputs, context)
    plain = _apply(call, get, target)
    return _ordered(plain, target, shape, instruction.order)


def _apply(call: Callable[..., Any], get: Sequence[tuple[bool, Any]], target: int) -> Thunk:
    match get:
        case [(True, a)]:

            def unary(s: Slots) -> None:
                s[target] = call(s[a])

            return unary
        case [(True, a), (True, b)]:

            def binary(s: Slots) -> None:
                s[target] = call(s[a], s[b])

            return binary

    def general(s: Slots) -> None:
        s[target] = call(*(s[x] if is_slot else x for is_slot, x in get))

    return general


def _getters(inputs: Sequence[Operand], context: Context) -> list[tuple[bool, Any]]:
    """Per operand: (True, its slot) or (False, the number)."""
    return [(True, context.slot(x)) if isinstance(x, str) else (False, x) for x in inputs]


def _ordered(
    plain: Thunk, target: int, shape: tuple[int, ...], order: tuple[int, ...] | None
) -> Thunk:
    """Make the result dense in a memory order; free where the op wrote it so."""
    if order is None:
        return plain
    strides = dense_strides(shape, order)

    def thunk(s: Slots) -> None:
        plain(s)
        s[target] = in_order(s[target], shape, strides)

    return thunk


def in_order(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The tensor itself where it has these strides, else a copy that has."""
    if x.stride() == strides:
        return x
    if all(n <= 1 or s == t for n, s, t in zip(shape, x.stride(), strides, strict=True)):
        return x.as_strided(shape, strides)
    made = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    return made.copy_(x)


def _scalar(instruction: Instruction, row: ops.Op, context: Context) -> Thunk:
    """An op on numbers only: torch computes it on the CPU, in the widest type of its kind."""
    target = context.slot(instruction.outputs[0])
    get = _getters(instruction.inputs, context)
    call = partial(row.call, **dict(instruction.attrs))

    def thunk(s: Slots) -> None:
        s[target] = scalar_call(call, [s[x] if is_slot else x for is_slot, x in get])

    return thunk


def scalar_call(call: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Call an op on numbers; returns a number."""
    wide = {bool: torch.bool, int: torch.int64, float: torch.float64}
    tensors = [torch.tensor(x, dtype=wide[type(x)]) for x in operands]
    return call(*tensors).item()


def as_number(x: Any, dtype: torch.dtype) -> bool | int | float | None:
    """A number of the kind that a host scalar of this dtype is; None where x cannot be one."""
    x = x.item() if isinstance(x, Tensor) and x.ndim == 0 else x
    if not isinstance(x, bool | int | float):
        return None
    if dtype.is_floating_point:
        return float(x)
    if isinstance(x, float) and not x.is_integer():
        return None
    kind = bool if dtype == torch.bool else int
    return kind(x) if kind(x) == x else None


def _launch(instruction: Instruction, context: Context) -> Thunk:
    """A host unit: its expressions in a row, its inner values forgotten at the end."""
    thunks = [_thunk(i, context) for i in instruction.body]
    inner = [o for i in instruction.body for o in i.outputs if o not in instruction.outputs]
    if inner:
        thunks.append(_drop(tuple(context.slot(n) for n in inner)))

    def thunk(s: Slots) -> None:
        for t in thunks:
            t(s)

    return thunk


# -- buffers -------------------------------------------------------------------------------------


def _alloc(instruction: Instruction, context: Context) -> Thunk:
    (output,) = instruction.outputs
    kind = context.type(output)
    return _allocate(context.slot(output), context.local(output), kind.dtype, context)


def _allocate(target: int, shape: tuple[int, ...], dtype: torch.dtype, context: Context) -> Thunk:
    empty = partial(torch.empty, shape, dtype=dtype, device=context.device)
    if not context.poison:

        def thunk(s: Slots) -> None:
            s[target] = empty()

        return thunk
    poison = ops.highest(dtype) if not dtype.is_floating_point else math.nan

    def poisoned(s: Slots) -> None:
        s[target] = empty().fill_(poison)

    return poisoned


def _narrow(instruction: Instruction, context: Context) -> Thunk:
    """This rank's part of what it holds: a view."""
    (output,) = instruction.outputs
    if 0 in context.local(output):
        kind = context.type(output)
        return _allocate(context.slot(output), context.local(output), kind.dtype, context)
    source, target = context.slot(instruction.reads[0]), context.slot(output)
    box = relative(context.box(output), context.box(instruction.reads[0]))
    index = tuple(slice(start, stop) for start, stop in box)

    def view(s: Slots) -> None:
        s[target] = s[source][index]

    return _ordered(view, target, context.local(output), instruction.order)


def _select(instruction: Instruction, context: Context) -> Thunk:
    """One element of each expanded dim: a view."""
    source = context.slot(instruction.reads[0])
    target = context.slot(instruction.outputs[0])
    dims = dict(instruction.attrs)["dims"]
    rank = len(context.type(instruction.outputs[0]).shape)
    index = tuple(slice(0, 1) if d in dims else slice(None) for d in range(rank))

    def view(s: Slots) -> None:
        s[target] = s[source][index]

    return view


def _pad(instruction: Instruction, context: Context) -> Thunk:
    """The same rows, then zeros up to the length of a block; a new dense buffer."""
    (output,) = instruction.outputs
    source, target = context.slot(instruction.reads[0]), context.slot(output)
    shape, dim = context.local(output), dict(instruction.attrs)["dim"]

    def thunk(s: Slots) -> None:
        x = s[source]
        if x.shape[dim] == shape[dim]:
            s[target] = x.contiguous()
            return
        made = x.new_zeros(shape)
        made.narrow(dim, 0, x.shape[dim]).copy_(x)
        s[target] = made

    return thunk


def _pack(instruction: Instruction, context: Context) -> Thunk:
    """One block after the other, each with the dim that is joined outermost."""
    source = context.slot(instruction.reads[0])
    target = context.slot(instruction.outputs[0])
    attrs = dict(instruction.attrs)
    layout = context.type(instruction.reads[0]).layout
    assert layout is not None
    parts = layout.mesh.axis_size(attrs["axis"])
    extent = context.local(instruction.reads[0])[attrs["to_dim"]]
    blocks = [nth_chunk((0, extent), parts, i) for i in range(parts)]

    def thunk(s: Slots) -> None:
        x = s[source].movedim(attrs["dim"], 0)
        to = attrs["to_dim"] + (attrs["to_dim"] < attrs["dim"])
        pieces = [x.narrow(to, a, b - a).reshape(-1) for a, b in blocks]
        s[target] = torch.cat(pieces)

    return thunk


def _zeros(instruction: Instruction, context: Context) -> Thunk:
    """What this rank holds, in zeros of the new size; zeros only away from coordinate 0."""
    (output,) = instruction.outputs
    (operand,) = instruction.reads
    source, target = context.slot(operand), context.slot(output)
    before, after = context.type(operand).layout, context.type(output).layout
    assert before is not None and after is not None
    coordinate = before.mesh.coordinate(context.rank)
    assert coordinate is not None
    copies = before.by_axis(), after.by_axis()
    new = [a for a in before.mesh.axes if copies[0][a] != copies[1][a] and str(copies[0][a]) == "R"]
    keeps = all(coordinate[before.mesh.axis_index(a)] == 0 for a in new)
    shape = context.local(output)
    box = relative(context.box(operand), context.box(output))
    index = tuple(slice(start, stop) for start, stop in box)

    def thunk(s: Slots) -> None:
        made = s[source].new_zeros(shape)
        if keeps:
            made[index] = s[source]
        s[target] = made

    return _ordered(thunk, target, shape, instruction.order)


_BUILDERS: dict[str, Callable[[Instruction, Context], Thunk]] = {
    "alloc": _alloc,
    "narrow": _narrow,
    "select": _select,
    "pad": _pad,
    "pack": _pack,
    "zeros": _zeros,
    "launch": _launch,
    "post": post,
    "wait": wait,
}
