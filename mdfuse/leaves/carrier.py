"""Carry parcels between ranks: by the backend of a job, or in one process for a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mdfuse.backends.base import Poster, flat
from mdfuse.layouts.call import Call
from mdfuse.leaves.meeting import Parcels, Rounds


class Carrier(Protocol):
    """Runs the rounds of one communication, for each rank of this process that takes part."""

    def carry(self, rounds: Sequence[tuple[int, Rounds]]) -> None:
        """Run (rank, its rounds) to the end.

        Raises:
            BackendError: a parcel did not come.
        """


@dataclass
class JobCarrier:
    """Carries the parcels of one rank by all-to-alls of bytes, which every backend has.

    Attributes:
        bind: prepares a call.
        device: where parcels lie.
        received: bytes that came from others so far.
    """

    bind: Callable[[Call], Poster]
    device: torch.device
    received: int = 0
    _posters: dict[Call, Poster] = field(default_factory=dict)

    def carry(self, rounds: Sequence[tuple[int, Rounds]]) -> None:
        """Run the rounds of this rank."""
        for rank, steps in rounds:
            for parcels in steps:
                if len(parcels.team) > 1:
                    self._exchange(rank, parcels)

    def _exchange(self, rank: int, parcels: Parcels) -> None:
        sent = [x for peer in parcels.team for x in map(as_bytes, parcels.sent.get(peer, ()))]
        sizes = [size_of(parcels.sent.get(peer, ())) for peer in parcels.team]
        room = [size_of(parcels.received.get(peer, ())) for peer in parcels.team]
        src = torch.cat(sent) if sent else self._new(0)
        dst = self._new(sum(room))
        call = Call(
            kind="AllToAll",
            team=parcels.team,
            rank=rank,
            send_counts=tuple(sizes),
            recv_counts=tuple(room),
            is_counted=True,
            backend=parcels.backend,
        )
        poster = self._posters.get(call)
        if poster is None:
            poster = self._posters[call] = self.bind(call)
        poster((src,), (dst,)).wait()
        self.received += sum(room)
        for peer, part in zip(parcels.team, dst.split(room), strict=True):
            fill(parcels.received.get(peer, ()), part)

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


@dataclass
class LocalCarrier:
    """Carries the parcels between ranks that this process simulates.

    Attributes:
        received: rank -> bytes that came from others so far.
    """

    received: dict[int, int] = field(default_factory=dict)

    def carry(self, rounds: Sequence[tuple[int, Rounds]]) -> None:
        """Run the rounds of all ranks that take part, round by round."""
        steps = dict(rounds)
        while steps:
            every = {rank: next(of, None) for rank, of in steps.items()}
            now = {rank: parcels for rank, parcels in every.items() if parcels is not None}
            boxes = {
                (rank, peer): torch.cat([x.clone() for x in map(as_bytes, xs)])
                for rank, parcels in now.items()
                for peer, xs in parcels.sent.items()
                if xs
            }
            for rank, parcels in now.items():
                for peer, xs in parcels.received.items():
                    if xs:
                        fill(xs, boxes.pop((peer, rank)))
                        self.received[rank] = self.received.get(rank, 0) + size_of(xs)
            left = {pair: box for pair, box in boxes.items() if len(box)}
            assert not left, f"parcels that nobody takes: {[*left]}"
            steps = {rank: steps[rank] for rank in now}


def as_bytes(x: Tensor) -> Tensor:
    """Return a view of the bytes of a dense tensor."""
    return flat(x).view(torch.uint8)


def size_of(xs: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.itemsize for x in xs)


def fill(xs: Sequence[Tensor], parcel: Tensor) -> None:
    """Fill tensors from the bytes of a parcel, in order."""
    at = 0
    for x in xs:
        size = x.numel() * x.itemsize
        as_bytes(x).copy_(parcel[at : at + size])
        at += size
    assert at == len(parcel), f"a parcel of {len(parcel)} bytes for {at}"
