"""Prepared posts and waits: how one rank's part of a communication meets its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import POINT_TO_POINT, Call, Poster, Work
from mdfuse.errors import CommunicationError, ProgramError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.layout import Box, nth_chunk
from mdfuse.plan.exchanges import Exchanges, transfer_team
from mdfuse.plan.pending import Pending, landing, nothing_posted
from mdfuse.plan.slots import Context, Slots, Step, Thunk, described, label
from mdfuse.transfers import Part

#: Kinds whose elements travel alike, so that any run of rows is a communication of its own.
IN_PIECES = ("Allreduce", "Reduce", "Broadcast")


class Posts:
    """Prepares the communications of one rank, in program order."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.exchanges = Exchanges(context)
        self.barriers = 0
        #: handle -> in how many pieces its post delivers, where these are several
        self.pieces: dict[str, int] = {}

    def steps(self, i: Instruction) -> list[Step]:
        """What an instruction becomes."""
        match i.op:
            case "post":
                return [self.post(i)]
            case "wait":
                return [self.wait(i)]
            case "barrier":
                return self.barrier(i)
        return self.exchanges.steps(i)

    def finish(self) -> None:
        """Raise ProgramError where a group, or a send to oneself, was not ended."""
        self.exchanges.finish()

    def post(self, i: Instruction) -> Step:
        context, comm = self.context, i.comm
        assert comm is not None
        part, pieces = comm.part(context.rank), _pieces(i)
        source, destination = (self.buffer(x, i) for x in i.inputs)
        handle = context.slot(i.outputs[0])
        context.bind_name(i.outputs[0])
        self.pieces[i.outputs[0]] = pieces
        call = part.call
        posters = tuple(context.bind(call) for _ in range(pieces)) if call is not None else ()
        alone = nothing_posted(self.context.has_streams)
        ends = _Ends(part, posters, source, destination, handle, alone)
        return Step(
            run=_post_pieces(ends) if comm.kind in POINT_TO_POINT else _post_collective(i, ends),
            label=label(i),
            op="post",
            inputs=tuple(x for x in (source, destination) if x is not None),
            outputs=(handle,),
            posters=posters,
        )

    def buffer(self, name: Any, i: Instruction) -> int | None:
        """The slot of a buffer that is posted."""
        if not isinstance(name, str):
            return None
        self.context.check_bound(replace(i, inputs=(name,)))
        return self.context.slot(name)

    def wait(self, i: Instruction) -> Step:
        (name,) = i.reads
        self.context.check_bound(i)
        handle, piece = self.context.slot(name), i.kwargs.get("piece")
        if piece is not None:
            self.check_piece(i, self.pieces.get(name, 1))

        def whole(s: Slots) -> None:
            s[handle].wait()
            s[handle] = None  # it holds on to buffers

        def part(s: Slots) -> None:
            s[handle].wait(piece)

        if piece is None:  # a second wait would find nothing
            self.context.bound.discard(name)
        run = whole if piece is None else part
        return Step(run=run, label=label(i), op="wait", waits=(handle, piece))

    def check_piece(self, i: Instruction, pieces: int) -> None:
        if not 0 <= i.kwargs["piece"] < pieces:
            raise ProgramError(
                f"{described(i)} on rank {self.context.rank}: the post delivers in {pieces} pieces",
                where=self.context.where(i),
                because=f"its pieces are 0 to {pieces - 1}",
                hint="say pieces= at the post",
            )

    def barrier(self, i: Instruction) -> list[Step]:
        """An all-reduce of one number, and its wait."""
        context, comm = self.context, i.comm
        assert comm is not None
        team = comm.team(context.rank)
        if len(team) < 2:
            return []
        call = Call(kind="Allreduce", team=team, rank=context.rank, reduce_op="sum")
        poster, ones = context.bind(call), torch.ones(1, device=context.device)
        handle = context.slot(f"barrier@{self.barriers}")
        self.barriers += 1

        def post(s: Slots) -> None:
            s[handle] = Pending((poster((ones,), (ones.clone(),)),))

        def wait(s: Slots) -> None:
            s[handle].wait()

        where = label(i)
        return [
            Step(run=post, label=where, op="post", outputs=(handle,), posters=(poster,)),
            Step(run=wait, label=where, op="wait", waits=(handle, None)),
        ]


def groups(program: HostProgram, rank: int) -> list[tuple[int, ...]]:
    """The groups of ranks that a projection's communications need, in program order."""
    found: dict[tuple[int, ...], None] = {}
    for i in program.walk():
        if i.comm is not None:
            found[i.comm.group(rank)] = None
        elif i.op in ("send", "recv"):
            found[transfer_team(program, i)] = None
    return [team for team in found if len(team) > 1]


def _pieces(i: Instruction) -> int:
    """In how many pieces a post delivers."""
    assert i.comm is not None
    pieces = i.kwargs.get("pieces", 1)
    where = [i.source.quote()] if i.source else []
    if not isinstance(pieces, int) or pieces < 1:
        raise ProgramError(
            f"{i.comm} in {pieces} pieces",
            where=where,
            because="a post delivers in one piece or more",
            hint="leave pieces= out",
        )
    if pieces > 1 and (i.comm.kind not in IN_PIECES or not i.comm.shape):
        raise ProgramError(
            f"{i.comm} of shape {i.comm.shape} in {pieces} pieces",
            where=where,
            because="only " + ", ".join(IN_PIECES) + " deliver in pieces, of the outermost dim",
            hint="leave pieces= out, or post it in a loop over chunks",
        )
    return pieces


# -- collectives ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ends:
    """One rank's part of a communication, its posters, and the slots of buffers and handle."""

    part: Part
    posters: tuple[Poster, ...]
    source: int | None
    destination: int | None
    handle: int
    alone: Callable[[], tuple[Work, ...]]


def _post_collective(i: Instruction, ends: _Ends) -> Thunk:
    """A post whose buffers the library takes as they are."""
    assert i.comm is not None
    takes, gives = _roles(ends.part)
    source = ends.source if takes else None
    destination = ends.destination if gives else None
    described = f"{i.comm} ({i.source or i.comm.kind})"
    post = _post_rows if len(ends.posters) > 1 else _post_whole

    def thunk(s: Slots) -> None:
        _copy_pieces(ends, s)
        srcs = () if source is None else (s[source],)
        dsts = () if destination is None else (s[destination],)
        for buffer in (*srcs, *dsts) if ends.posters else ():
            if not buffer.is_contiguous():
                raise _not_dense(described, buffer)
        posted = post(ends.posters, srcs, dsts) if ends.posters else Pending(ends.alone())
        s[ends.handle] = posted

    return thunk


def _post_whole(
    posters: tuple[Poster, ...], srcs: tuple[Tensor, ...], dsts: tuple[Tensor, ...]
) -> Pending:
    return Pending((posters[0](srcs, dsts),))


def _post_rows(
    posters: tuple[Poster, ...], srcs: tuple[Tensor, ...], dsts: tuple[Tensor, ...]
) -> Pending:
    """In pieces: the chunks of the outermost dim, one after the other."""
    parts = len(posters)

    def rows(buffers: tuple[Tensor, ...], n: int) -> list[Tensor]:
        return [x[slice(*nth_chunk((0, x.shape[0]), parts, n))] for x in buffers]

    return Pending(tuple(p(rows(srcs, n), rows(dsts, n)) for n, p in enumerate(posters)))


def _roles(part: Part) -> tuple[bool, bool]:
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
    return table.get(call.kind, (True, True))


def _not_dense(described: str, buffer: Tensor) -> CommunicationError:
    return CommunicationError(
        f"{described}: a buffer of shape {tuple(buffer.shape)} has strides {buffer.stride()}",
        because="a communication sees a pointer and a count, so its buffers are dense",
        hint="make it contiguous before the post",
    )


# -- point-to-point ------------------------------------------------------------------------------


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _copy_pieces(ends: _Ends, s: Slots) -> None:
    """What stays on this rank."""
    for before, after in ends.part.copies:
        assert ends.source is not None and ends.destination is not None
        s[ends.destination][_index(after)] = s[ends.source][_index(before)]


def _post_pieces(ends: _Ends) -> Thunk:
    """Pieces of the source go out, pieces of the destination come in."""
    outgoing = tuple(map(_index, ends.part.sends))
    incoming = tuple(map(_index, ends.part.recvs))
    source, destination, handle = ends.source, ends.destination, ends.handle

    def thunk(s: Slots) -> None:
        _copy_pieces(ends, s)
        if not ends.posters:
            s[handle] = Pending(ends.alone())
            return
        srcs = [s[source][index].contiguous() for index in outgoing]  # type: ignore[index]
        landed = [landing(s[destination][index]) for index in incoming]  # type: ignore[index]
        work = ends.posters[0](srcs, [dst for dst, _ in landed])
        s[handle] = Pending((work,), tuple(c for _, copies in landed for c in copies))

    return thunk
