"""The communications that ranks begin, as backends see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mdfuse.communication import Communication
from mdfuse.hir.instructions import POSTS, counts_of
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.localize import transfer_team
from mdfuse.hir.verify.error_report import wrong
from mdfuse.hir.verify.post_sizes import elements, part_on
from mdfuse.ir.graph import dtype_name
from mdfuse.layouts.call import Call
from mdfuse.names import base_name

#: Straight-line programs by rank.
Programs = Mapping[int, HostProgram]


@dataclass(frozen=True, slots=True, eq=False)
class PostEvent:
    """The beginning of a communication on one rank.

    Attributes:
        program: what the rank runs.
        at: the position of the instruction.
        i: the instruction.
        call: what it posts, as backends see it; for send and recv an Exchange.
        dtype: of the elements.
        counts: elements of the source and of the destination; None where it has none.
        sends: point-to-point: the elements of each send.
        recvs: point-to-point: the elements of each receive.
    """

    program: HostProgram
    at: int
    i: Instruction
    call: Call
    dtype: torch.dtype | None = None
    counts: tuple[int | None, int | None] = (None, None)
    sends: tuple[int, ...] = ()
    recvs: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return self.call.rank

    @property
    def handle(self) -> str:
        """The handle of the post, with the number of the iteration; empty for a barrier."""
        return self.i.outputs[0] if self.i.outputs else ""

    @property
    def base(self) -> str:
        """The handle without the number of the iteration."""
        return base_name(self.handle)

    @property
    def name(self) -> str:
        """The name of the communication in error messages."""
        return f"%{self.handle}" if self.handle else self.i.op

    @property
    def place(self) -> tuple[HostProgram, Instruction]:
        return self.program, self.i


def events(program: HostProgram) -> Iterator[PostEvent]:
    """Yield the communications that a rank begins, in the order of its program."""
    assert program.rank is not None
    for at, i in enumerate(program.instructions):
        if i.op == "barrier":
            yield from _barrier(program, at, i)
        elif i.op == "post":
            yield from _post(program, at, i)
        elif i.op in POSTS:
            yield _transfer(program, at, i)


def _barrier(program: HostProgram, at: int, i: Instruction) -> Iterator[PostEvent]:
    assert i.comm is not None and program.rank is not None
    team = i.comm.team(program.rank)
    if len(team) > 1:
        yield PostEvent(program, at, i, Call(kind="Barrier", team=team, rank=program.rank))


def _post(program: HostProgram, at: int, i: Instruction) -> Iterator[PostEvent]:
    assert i.comm is not None and program.rank is not None
    part = part_on(program, i, program.rank)
    if part.call is not None:
        source, destination = (
            _elements(program, x) if isinstance(x, str) else None for x in i.inputs[:2]
        )
        yield PostEvent(
            program,
            at,
            i,
            part.call,
            i.comm.dtype,
            (source, destination),
            elements(part.sends),
            elements(part.recvs),
        )


def _elements(program: HostProgram, name: str) -> int:
    return math.prod(program.types[name].local_shape(program.rank))


def _transfer(program: HostProgram, at: int, i: Instruction) -> PostEvent:
    """Return the event of a `send` or `recv`; raise ProgramError if the peer is not in the mesh."""
    (name,) = i.reads
    kind, rank = program.types[name], program.rank
    assert rank is not None
    team, peer = transfer_team(program, i, rank), i.kwargs["to" if i.op == "send" else "from"]
    if not isinstance(peer, int) or peer not in team:
        raise wrong(
            program,
            i,
            f"{i.op} of %{name} with rank {peer}",
            because=f"the buffer lives on the ranks {', '.join(map(str, team))}",
            hint="name one of them",
        )
    peers, size, by = (peer,), (_elements(program, name),), i.kwargs.get("backend")
    if i.op == "send":
        call = Call(kind="Exchange", team=team, rank=rank, sends=peers, backend=by)
        return PostEvent(program, at, i, call, kind.dtype, sends=size)
    call = Call(kind="Exchange", team=team, rank=rank, recvs=peers, backend=by)
    return PostEvent(program, at, i, call, kind.dtype, recvs=size)


def _buffers(event: PostEvent) -> list[str | None]:
    """Return the names of a post's buffers, without the number of the iteration."""
    inputs = event.i.inputs[:2] if event.i.op == "post" else ()
    return [base_name(x) if isinstance(x, str) else None for x in inputs]


def _change(comm: Communication | None) -> str:
    """Return the change of layout of a post, as a program prints it."""
    return f"{comm.source} => {comm.destination} {comm}" if comm is not None else ""


def difference(a: PostEvent, b: PostEvent) -> tuple[str, str, str] | None:
    """Return the first difference of two posts: (what, its value in `a`, its value in `b`)."""
    if a.handle != b.handle:
        return "", a.name, b.name
    facts: list[tuple[str, Callable[[PostEvent], Any]]] = [
        ("kind", lambda e: e.call.kind),
        ("reduce op", lambda e: e.call.reduce_op),
        ("root", lambda e: e.call.root),
        ("pieces", lambda e: e.i.kwargs.get("pieces")),
        ("counts", lambda e: counts_of(e.i)),
        ("dtype", lambda e: dtype_name(e.dtype) if e.dtype is not None else None),
    ]
    if a.i.comm is not None and b.i.comm is not None:
        facts.append(("layouts", lambda e: _change(e.i.comm)))
    for what, fact in facts:
        if fact(a) != fact(b):
            return what, str(fact(a)), str(fact(b))
    for x, y in zip(_buffers(a), _buffers(b), strict=True):
        if x is not None and y is not None and x != y:
            return "buffer", f"%{x}", f"%{y}"
    return None
