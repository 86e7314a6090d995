"""Host programs with one instruction of one rank broken, in every way that a verifier is to see."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mdfuse import DeviceMesh, MdfuseError
from mdfuse.communication import Communication
from mdfuse.extents.expressions import Calc, calc
from mdfuse.hir import BufferType, HostProgram, Instruction
from mdfuse.hir.verify.check import verify

Block = tuple[Instruction, ...]
POSTS = ("post", "send", "recv")


@dataclass(frozen=True)
class Mutant:
    """One rank's projection with one change.

    Attributes:
        what: the change.
        instruction: where it was made.
        program: the projection.
    """

    what: str
    instruction: Instruction
    program: HostProgram

    def __str__(self) -> str:
        return f"{self.what} at {self.instruction} of rank {self.program.rank}"


def mutants(program: HostProgram) -> Iterator[Mutant]:
    """Every mutant of a projection."""
    for block, at in places(program.instructions):
        here = block[at]
        for what, change in _changes(program, block, at):
            yield Mutant(what, here, edited(program, block, change))
        for what, kind in _other_types(program, here):
            types = {**program.types, here.outputs[0]: kind}
            yield Mutant(what, here, replace(program, types=types))


def places(block: Block) -> Iterator[tuple[Block, int]]:
    """Each instruction, as a place in its block; host units are one."""
    for at, i in enumerate(block):
        yield block, at
        if i.op in ("for", "if"):
            yield from places(i.body)
            yield from places(i.orelse)


def edited(program: HostProgram, old: Block, new: Block) -> HostProgram:
    """The program with one of its blocks (this very object) replaced."""

    def rebuilt(block: Block) -> Block:
        if block is old:
            return new
        return tuple(
            replace(i, body=rebuilt(i.body), orelse=rebuilt(i.orelse))
            if i.op in ("for", "if")
            else i
            for i in block
        )

    return replace(program, instructions=rebuilt(program.instructions))


def _changes(program: HostProgram, block: Block, at: int) -> Iterator[tuple[str, Block]]:
    i = block[at]
    if i.op != "return" and not _updates(program, i):
        yield "drop", (*block[:at], *block[at + 1 :])
    if i.op in ("alloc", "free", "wait", *POSTS):
        yield "repeat", (*block[: at + 1], *block[at:])
    for what, to in _moves(block, at):
        rest = (*block[:at], *block[at + 1 :])
        yield what, (*rest[:to], i, *rest[to:])
    for what, other in _others(i):
        yield what, (*block[:at], other, *block[at + 1 :])


def _updates(program: HostProgram, i: Instruction) -> bool:
    """It writes where there is something already: without it the program is another, but right."""
    return bool({*i.outputs} & {*i.reads}) or any(
        program.root(n) in program.inputs for n in i.outputs
    )


def _moves(block: Block, at: int) -> Iterator[tuple[str, int]]:
    """Places to which an instruction is moved."""
    last = len(block) - 1 - (block[-1].op == "return")
    if block[at].op in POSTS:
        later = [n for n in range(at + 1, len(block)) if block[n].op in POSTS]
        yield from (("swap with a later post", n) for n in later[:2])
    if block[at].op in ("free", "wait", "sync", "set_stream", "group_end"):
        yield from (("move up", at - n) for n in (1, 2, 4) if at - n >= 0)
    if block[at].op in ("wait", "sync", "set_stream", "alloc", "group_start", *POSTS):
        yield from (("move down", at + n) for n in (1, 2, 4) if at + n <= last)


def _others(i: Instruction) -> Iterator[tuple[str, Instruction]]:
    """The instruction with something else in it."""
    attrs = i.kwargs
    if i.op in ("send", "recv"):
        side = "to" if i.op == "send" else "from"
        yield "another peer", with_attrs(i, **{side: _plus(attrs[side], 1)})
        yield "another peer", with_attrs(i, **{side: _plus(attrs[side], -1)})
    if i.op in ("set_stream", "sync") and i.attrs:
        yield "another stream", with_attrs(i, stream=_plus(attrs["stream"], 1))
    if i.op == "for" and isinstance(attrs["stop"], int):
        yield "one iteration less", with_attrs(i, stop=attrs["stop"] - 1)
    if i.op == "wait" and i.attrs:
        yield "another piece", with_attrs(i, piece=_plus(attrs["piece"], 1))
    if i.op == "post" and i.comm is not None:
        for what, change in _OTHER_POSTS:
            comm = _built(change, i.comm)
            if comm is not None and comm != i.comm:
                yield what, replace(i, comm=comm)
        yield "no source", replace(i, inputs=(None, i.inputs[1]))
        yield "no destination", replace(i, inputs=(i.inputs[0], None))


def with_attrs(i: Instruction, **changes: Any) -> Instruction:
    return replace(i, attrs=tuple({**i.kwargs, **changes}.items()))


def _plus(index: Any, n: int) -> Any:
    return calc("+", index, n) if isinstance(index, int | Calc) else Calc("+", index, n)


def _built(change: Callable[[Communication], Communication], comm: Communication) -> Any:
    try:
        return change(comm)
    except (MdfuseError, StopIteration, IndexError):  # of a scalar there is no other shape
        return None  # no such communication: there is nothing to post


def _turned(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, beginning with another one."""
    if mesh.ndim != 1:
        return mesh
    return DeviceMesh([*mesh.ranks[1:], mesh.ranks[0]], axes=mesh.axes)


def _on(layout: Any, mesh: DeviceMesh) -> Any:
    return type(layout)(mesh, layout.by_axis(), layout.order, layout.stream)


def _other_root(c: Communication) -> Communication:
    """A mesh of senders (or receivers) that begins with another rank has another root."""
    if c.kind in ("Reduce", "Gather"):
        return replace(c, destination=_on(c.destination, _turned(c.destination.mesh)))
    return replace(c, source=_on(c.source, _turned(c.source.mesh)))


def _longer(c: Communication) -> Communication:
    return replace(c, shape=(c.shape[0] + 4, *c.shape[1:]))


def _shorter(c: Communication) -> Communication:
    return replace(c, shape=(*c.shape[:-1], max(c.shape[-1] // 2, 1)))


def _other_axis(c: Communication) -> Communication:
    axes = tuple(a for a in c.source.mesh.axes if a not in c.axes)
    return replace(c, axes=axes[:1]) if axes and c.axes else c


_OTHER_POSTS: tuple[tuple[str, Callable[[Communication], Communication]], ...] = (
    ("another reduce op", lambda c: replace(c, reduce_op="max" if c.reduce_op == "sum" else "sum")),
    ("another dtype", lambda c: replace(c, dtype=torch.float64)),
    ("another dtype", lambda c: replace(c, dtype=torch.float16)),
    ("more rows", _longer),
    ("fewer columns", _shorter),
    ("another root", _other_root),
    ("another axis", _other_axis),
    ("another kind", lambda c: replace(c, kind="Reduce" if c.kind == "Allreduce" else "Allreduce")),
    ("another kind", lambda c: replace(c, kind="Broadcast")),
)


def _other_types(program: HostProgram, i: Instruction) -> Iterator[tuple[str, BufferType]]:
    """Another type of a buffer that is allocated."""
    if i.op != "alloc":
        return
    kind = program.types[i.outputs[0]]
    yield "another dtype", replace(kind, dtype=torch.float16)
    yield "another dtype", replace(kind, dtype=torch.float64)
    if kind.shape:
        yield "more rows", replace(kind, shape=(kind.shape[0] + 4, *kind.shape[1:]))
        yield "fewer columns", replace(kind, shape=(*kind.shape[:-1], max(kind.shape[-1] // 2, 1)))


# -- the same verdict, however few instructions stand for all --------------------------------------


def broken(block: Block, at: int) -> Iterator[Block]:
    """A block without an instruction, with it twice, behind the next one, or broken inside."""
    i = block[at]
    yield (*block[:at], *block[at + 1 :])
    yield (*block[: at + 1], *block[at:])
    yield (*block[:at], *block[at + 1 : at + 2], i, *block[at + 2 :])
    for n in range(len(i.body)):
        for body in broken(i.body, n):
            yield (*block[:at], replace(i, body=body), *block[at + 1 :])


def check_verdicts(program: HostProgram, places: Iterable[int], seed: int, count: int) -> None:
    """Some programs broken at places, some of them wrong, are judged as all is written out."""
    code = program.instructions
    spoiled = [block for at in places for block in broken(code, at)]
    drawn = random.Random(seed).sample(spoiled, min(len(spoiled), count))
    programs = [replace(program, instructions=block) for block in drawn]
    verdicts = [(is_right(p, False), is_right(p, True)) for p in programs]
    assert all(a == b for a, b in verdicts)
    assert len({*verdicts}) == 2


def loops(program: HostProgram) -> list[int]:
    """Where a program has loops of more than four instructions."""
    return [n for n, i in enumerate(program.instructions) if i.op == "for" and len(i.body) > 4]


def is_right(program: HostProgram, in_full: bool) -> bool:
    """The verifier's verdict."""
    try:
        verify(program, in_full)
    except MdfuseError:
        return False
    return True
