"""A stand-in for other ranks: what they would send is copied from pinned memory of the host.

One GPU stands for a rank of several. A copy from the host is slower than one from another GPU, so
only that share of each piece is copied that takes as long as all of it would take over the link.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import mdfuse as mf
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.symmetric.cuda_memory import CudaLane
from mdfuse.layouts.call import Call
from mdfuse.runtime.backend_rows import BACKENDS, World

#: `Options.backend` of programs whose ranks would copy out of each other's memory.
SYMMETRIC = "null,tp=symmetric"

#: Copies of whole lines of memory.
_ALIGNED = 256


class HostLane:
    """Copies at once, between memory of the host."""

    def begin(self) -> None:
        """Do nothing: all that was to come before has been done."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between two addresses."""
        ctypes.memmove(target, source, size)

    def end(self) -> Callable[[], None]:
        """Return what waits for nothing."""
        return lambda: None


def lane(device: torch.device) -> HostLane | CudaLane:
    """A queue of copies beside the current stream."""
    if device.type == "cpu":
        return HostLane()
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # makes its context current, which the driver asks for
    return CudaLane(CudaDevice(device), device.index)


@dataclass(eq=False)
class Copies:
    """A backend whose posts are copies from, and to, the host.

    Attributes:
        device: where this rank's buffers are.
        share: how much of each piece is copied.
        incoming: rank -> all that it sends in a run, in pinned memory.
    """

    device: torch.device
    name: str = "null"
    share: float = 1.0
    incoming: Mapping[int, Tensor] = field(default_factory=dict)
    _sink: Tensor = field(default_factory=lambda: torch.empty(0))
    #: rank -> how many bytes of what it sends have come in this run
    _at: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._into, self._out = lane(self.device), lane(self.device)

    def expect(self, incoming: Mapping[int, Tensor], share: float, sent: int) -> None:
        """Say what comes from each rank, and how much of it; at most `sent` bytes go at once."""
        self.incoming, self.share, self._at = incoming, share, dict.fromkeys(incoming, 0)
        if sent > self._sink.nbytes:  # graphs write there, so it is not made anew for each
            self._sink = pinned(torch.empty(sent, dtype=torch.uint8), self.device)

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Make no teams: nobody else is there."""

    def bind(self, call: Call) -> _Poster:
        """Prepare a call."""
        return _Poster(self, call)

    def close(self) -> None:
        """Give up nothing."""

    def receive(self, peer: int, into: Tensor) -> None:
        """Copy the next piece that a rank sends."""
        size, whole = into.nbytes, self.incoming[peer]
        at = self._at[peer]
        self._at[peer] = (at + size) % whole.nbytes
        self._into.copy(into.data_ptr(), whole.data_ptr() + at, self._part(size))

    def send(self, piece: Tensor) -> None:
        """Copy a piece to the host."""
        self._out.copy(self._sink.data_ptr(), piece.data_ptr(), self._part(piece.nbytes))

    def keep(self, piece: Tensor, into: Tensor) -> None:
        """Copy what stays on this rank."""
        self._into.copy(into.data_ptr(), piece.data_ptr(), piece.nbytes)

    def begin(self) -> None:
        """Let copies follow what is queued on the current stream."""
        self._into.begin()
        self._out.begin()

    def end(self) -> tuple[Callable[[], None], ...]:
        """Return a function that lets the current stream wait for the copies so far."""
        return self._into.end(), self._out.end()

    def _part(self, size: int) -> int:
        return size if self.share == 1 else min(size, int(size * self.share) // _ALIGNED * _ALIGNED)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A tensor in memory of the host that a GPU reads directly."""
    x = x.contiguous().cpu()
    return x.pin_memory() if device.type == "cuda" else x


@dataclass(eq=False)
class _Poster:
    """A call of a rank whose partners are stood in for."""

    copies: Copies
    call: Call
    _scratch: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> _Copying:
        copies, call = self.copies, self.call
        others = [r for r in call.team if r != call.rank]
        place = call.team.index(call.rank)
        sum_up: Callable[[], object] = _nothing
        copies.begin()
        match call.kind:
            case "Exchange":
                for src in srcs:
                    copies.send(src)
                for peer, dst in zip(call.recvs, dsts, strict=True):
                    copies.receive(peer, dst)
            case "Allgather":
                blocks = dsts[0].view(-1).chunk(len(call.team))
                copies.keep(srcs[0], blocks[place])
                for peer in others:
                    copies.send(srcs[0])
                    copies.receive(peer, blocks[call.team.index(peer)])
            case "ReduceScatter":
                blocks, (dst,) = srcs[0].view(-1).chunk(len(call.team)), dsts
                rows = self._rows(dst, len(others))
                for peer, row in zip(others, rows, strict=True):
                    copies.send(blocks[call.team.index(peer)])
                    copies.receive(peer, row)

                def sum_up() -> object:
                    return torch.sum(torch.stack([blocks[place].view_as(dst), *rows]), 0, out=dst)

            case _:
                raise NotImplementedError(call.kind)
        into, out = copies.end()
        return _Copying(_Side(into, dsts), _Side(out, srcs), sum_up)

    def prepare(self, srcs: object, dsts: object, place: object) -> None:
        """Return None: a post reads the addresses of its buffers in each run."""

    def _rows(self, dst: Tensor, count: int) -> tuple[Tensor, ...]:
        scratch = self._scratch.get(dst.nbytes)
        if scratch is None:
            scratch = self._scratch[dst.nbytes] = dst.new_empty((count, *dst.shape))
        return tuple(scratch)


def _nothing() -> None:
    """Sum nothing up."""


@dataclass(eq=False)
class _Side:
    """Copies into this rank, or out of it; `alive` lives until they are waited for."""

    join: Callable[[], None]
    alive: object

    def wait(self) -> None:
        """Let the current stream wait."""
        self.join()
        self.alive = None


@dataclass(eq=False)
class _Copying:
    """Copies to wait for, those into this rank and out of it also by themselves."""

    received: _Side
    sent: _Side
    sum_up: Callable[[], object]

    def wait(self) -> None:
        """Let the current stream wait, and add up what came."""
        self.received.wait()
        self.sent.wait()
        self.sum_up()


def stand_in(size: int, device: torch.device) -> tuple[mf.Communicator, Copies]:
    """Stand for rank 0 of several, whose others are stood in for by copies.

    They stand for those of the backend symmetric, whose programs are also for `SYMMETRIC` here.
    """
    all_copies: list[Copies] = []

    def opened(world: World) -> Copies:
        all_copies.append(Copies(world.device))
        return all_copies[-1]

    BACKENDS["null"] = replace(BACKENDS["null"], open=opened)
    BACKENDS["symmetric"] = replace(BACKENDS["null"], open=lambda world: all_copies[0])
    comm = mf.init(backend="null", rank=0, size=size, device=device)
    return comm, all_copies[0]
