"""Prepared posts and waits: how one rank's part of a communication meets its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import POINT_TO_POINT, Call, Poster, Work
from mdfuse.errors import CommunicationError
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.layout import Box
from mdfuse.transfers import Part

Slots = list[Any]
Thunk = Callable[[Slots], None]


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
class Context:
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


def post(instruction: Instruction, context: Context) -> Thunk:
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
    takes, gives = _roles(part)
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


def wait(instruction: Instruction, context: Context) -> Thunk:
    handle = context.slot(instruction.reads[0])

    def thunk(s: Slots) -> None:
        s[handle].wait()

    return thunk
