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

from mdfuse.backends.base import Call, Poster, Work
from mdfuse.communication import POINT_TO_POINT, Communication, Part
from mdfuse.errors import CommunicationError, ProgramError
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.ir import ops
from mdfuse.ir.graph import Operand
from mdfuse.ir.infer import dense_strides
from mdfuse.layout import Box, nth_chunk, relative

Slots = list[Any]
Thunk = Callable[[Slots], None]


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


@dataclass(frozen=True, slots=True)
class Pending:
    """A posted communication: its work, and copies to make once it is done."""

    work: Work | None
    unpack: tuple[tuple[Tensor, Tensor], ...] = ()

    def wait(self) -> None:
        """Wait for the work, then move what arrived to where it belongs."""
        if self.work is not None:
            self.work.wait()
        for destination, source in self.unpack:
            destination.copy_(source)


@dataclass(frozen=True, slots=True)
class _Context:
    """What building a thunk needs to know."""

    program: HostProgram
    rank: int
    slots: dict[str, int]
    bind: Callable[[Call], Poster]
    device: torch.device
    poison: bool

    def slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots))

    def type(self, name: str) -> BufferType:
        return self.program.types[name]

    def box(self, name: str) -> Box:
        return self.type(name).box(self.rank)

    def local(self, name: str) -> tuple[int, ...]:
        return self.type(name).local_shape(self.rank)


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
    context = _Context(program, rank, {}, bind, device, poison)
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


def _thunk(instruction: Instruction, context: _Context) -> Thunk:
    if instruction.fn in ops.TABLE and instruction.op != "launch":
        return _compute(instruction, context)
    return _BUILDERS[instruction.op](instruction, context)


# -- local ops -----------------------------------------------------------------------------------


def _compute(instruction: Instruction, context: _Context) -> Thunk:
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


def _getters(inputs: Sequence[Operand], context: _Context) -> list[tuple[bool, Any]]:
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


def _scalar(instruction: Instruction, row: ops.Op, context: _Context) -> Thunk:
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


def _launch(instruction: Instruction, context: _Context) -> Thunk:
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


def _alloc(instruction: Instruction, context: _Context) -> Thunk:
    (output,) = instruction.outputs
    kind = context.type(output)
    return _allocate(context.slot(output), context.local(output), kind.dtype, context)


def _allocate(target: int, shape: tuple[int, ...], dtype: torch.dtype, context: _Context) -> Thunk:
    empty = partial(torch.empty, shape, dtype=dtype, device=context.device)
    if not context.poison:

        def thunk(s: Slots) -> None:
            s[target] = empty()

        return thunk
    poison = ops.highest(dtype) if not dtype.is_floating_point else math.nan

    def poisoned(s: Slots) -> None:
        s[target] = empty().fill_(poison)

    return poisoned


def _narrow(instruction: Instruction, context: _Context) -> Thunk:
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


def _select(instruction: Instruction, context: _Context) -> Thunk:
    """One element of each expanded dim: a view."""
    source = context.slot(instruction.reads[0])
    target = context.slot(instruction.outputs[0])
    dims = dict(instruction.attrs)["dims"]
    rank = len(context.type(instruction.outputs[0]).shape)
    index = tuple(slice(0, 1) if d in dims else slice(None) for d in range(rank))

    def view(s: Slots) -> None:
        s[target] = s[source][index]

    return view


def _pad(instruction: Instruction, context: _Context) -> Thunk:
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


def _pack(instruction: Instruction, context: _Context) -> Thunk:
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


def _zeros(instruction: Instruction, context: _Context) -> Thunk:
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


# -- communications ------------------------------------------------------------------------------


def _post(instruction: Instruction, context: _Context) -> Thunk:
    comm = instruction.comm
    assert comm is not None
    part = comm.part(context.rank)
    source, destination = (
        context.slot(x) if isinstance(x, str) else None for x in instruction.inputs
    )
    handle = context.slot(instruction.outputs[0])
    poster = context.bind(part.call) if part.call is not None else None
    if comm.kind in POINT_TO_POINT:
        return _post_pieces(part, poster, source, destination, handle)
    takes, gives = _roles(comm, part, source, destination)
    described = f"{comm} ({instruction.source or comm.kind})"

    def thunk(s: Slots) -> None:
        _copy_pieces(part, s, source, destination)
        if poster is None:
            s[handle] = Pending(None)
            return
        srcs = (s[source],) if takes and source is not None else ()
        dsts = (s[destination],) if gives and destination is not None else ()
        for buffer in (*srcs, *dsts):
            if not buffer.is_contiguous():
                raise _not_dense(described, buffer)
        s[handle] = Pending(poster(srcs, dsts))

    return thunk


def _roles(
    comm: Communication, part: Part, source: int | None, destination: int | None
) -> tuple[bool, bool]:
    """Whether this rank gives the library its source, and its destination."""
    call = part.call
    if call is None:
        return False, False
    at_root = call.root == call.rank
    table = {
        "Broadcast": (at_root, not at_root),
        "Reduce": (True, at_root),
        "Gather": (call.rank in call.parts, at_root),
        "Scatter": (at_root, call.rank in call.parts),
    }
    return table.get(comm.kind, (True, True))


def _not_dense(described: str, buffer: Tensor) -> CommunicationError:
    return CommunicationError(
        f"{described}: a buffer of shape {tuple(buffer.shape)} has strides {buffer.stride()}",
        because="a communication sees a pointer and a count, so its buffers are dense",
        hint="make it contiguous before the post",
    )


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _copy_pieces(part: Part, s: Slots, source: int | None, destination: int | None) -> None:
    """What stays on this rank."""
    for before, after in part.copies:
        assert source is not None and destination is not None
        s[destination][_index(after)] = s[source][_index(before)]


def _post_pieces(
    part: Part, poster: Any, source: int | None, destination: int | None, handle: int
) -> Thunk:
    """Point-to-point: pieces of the source go out, pieces of the destination come in."""
    outgoing = tuple(map(_index, part.sends))
    incoming = tuple(map(_index, part.recvs))

    def thunk(s: Slots) -> None:
        _copy_pieces(part, s, source, destination)
        if poster is None:
            s[handle] = Pending(None)
            return
        srcs = [s[source][index].contiguous() for index in outgoing]  # type: ignore[index]
        places = [s[destination][index] for index in incoming]  # type: ignore[index]
        dsts = [p if p.is_contiguous() else torch.empty_like(p).contiguous() for p in places]
        unpack = tuple((p, d) for p, d in zip(places, dsts, strict=True) if p is not d)
        s[handle] = Pending(poster(srcs, dsts), unpack)

    return thunk


def _wait(instruction: Instruction, context: _Context) -> Thunk:
    handle = context.slot(instruction.reads[0])

    def thunk(s: Slots) -> None:
        s[handle].wait()

    return thunk


_BUILDERS: dict[str, Callable[[Instruction, _Context], Thunk]] = {
    "alloc": _alloc,
    "narrow": _narrow,
    "select": _select,
    "pad": _pad,
    "pack": _pack,
    "zeros": _zeros,
    "launch": _launch,
    "post": _post,
    "wait": _wait,
}
