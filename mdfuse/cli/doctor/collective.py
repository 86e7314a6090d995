"""Check the values and the speed of small communications on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from mdfuse.backends.base import Poster
from mdfuse.cli.launched_runs import timed
from mdfuse.cli.rich_tables import size_text, time_text, titled
from mdfuse.layouts.call import Call
from mdfuse.runtime.communicator import Communicator

#: Bytes per communication, from a size that latency decides to one that bandwidth decides.
SIZES = (1 << 10, 1 << 20, 1 << 24)

#: Timed rounds, without a barrier in between; a round before them is checked.
ROUNDS = 10

#: Values repeat after so many elements, so that sums over thousands of ranks are exact in f32.
_PERIOD = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurement of one kind of communication in one size.

    Attributes:
        backend: the backend that carried it.
        what: the kind.
        size: bytes of the whole tensor.
        arrives: bytes that arrive at a rank, as in a ring.
        seconds: of one round, on this rank.
        wrong: why the result is wrong on this rank, or None.
    """

    backend: str
    what: str
    size: int
    arrives: int
    seconds: float
    wrong: str | None

    @property
    def bandwidth(self) -> float:
        """Bytes per second that arrive at a rank."""
        return self.arrives / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One rank's part of a checked communication, its expected result, and bytes that arrive."""

    call: Call
    source: Tensor
    expected: Tensor
    arrives: int


def pattern(rank: int, elements: int) -> Tensor:
    """Return the numbers that a rank sends: `i % 128 + rank % 8`, f32, of shape (elements,)."""
    return torch.arange(elements).remainder(_PERIOD).float() + rank % 8


def _allreduce(rank: int, team: tuple[int, ...], size: int) -> _Case:
    n, k = len(team), max(1, size // 4)
    whole = pattern(0, k) * n + sum(r % 8 for r in team)
    call = Call(kind="Allreduce", team=team, rank=rank, reduce_op="sum")
    arrives = 2 * (n - 1) * k * 4 // n
    return _Case(call=call, source=pattern(rank, k), expected=whole, arrives=arrives)


def _allgather(rank: int, team: tuple[int, ...], size: int) -> _Case:
    n = len(team)
    k = max(1, size // 4 // n)
    whole = torch.cat([pattern(r, k) for r in team])
    call = Call(kind="Allgather", team=team, rank=rank)
    return _Case(call=call, source=pattern(rank, k), expected=whole, arrives=(n - 1) * k * 4)


def _ring(rank: int, team: tuple[int, ...], size: int) -> _Case:
    n, k = len(team), max(1, size // 4)
    after, before = (rank + 1) % n, (rank - 1) % n
    call = Call(kind="Exchange", team=team, rank=rank, sends=(after,), recvs=(before,))
    return _Case(call=call, source=pattern(rank, k), expected=pattern(before, k), arrives=k * 4)


_CASES: dict[str, Callable[[int, tuple[int, ...], int], _Case]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "send to the next rank": _ring,
}


def measure(comm: Communicator, sizes: Sequence[int] = SIZES) -> list[Measured]:
    """Measure each kind in each size; all ranks, at least two, call it.

    Raises:
        CommunicationError: a communication broke or did not finish.
    """
    team = tuple(range(comm.size))
    comm.prepare([team])
    return [_measured(comm, what, s) for what in _CASES for s in sizes]


def _measured(comm: Communicator, what: str, size: int) -> Measured:
    case = _CASES[what](comm.rank, tuple(range(comm.size)), size)
    source = case.source.to(comm.device)
    result = torch.full_like(case.expected, torch.nan, device=comm.device)
    poster = comm.poster(case.call)
    _seconds(comm, poster, source, result, 1)
    wrong = int((result.cpu() != case.expected).sum())
    seconds = _seconds(comm, poster, source, result, ROUNDS)
    elements = case.expected.numel()
    return Measured(
        backend=comm.backend,
        what=what,
        size=size,
        arrives=case.arrives,
        seconds=seconds,
        wrong=f"{wrong} of {elements} elements of {what} are wrong" if wrong else None,
    )


def _seconds(
    comm: Communicator, poster: Poster, source: Tensor, result: Tensor, rounds: int
) -> float:
    """Return the seconds of one round, measured from when all ranks are ready."""

    def post() -> None:
        for _ in range(rounds):
            poster([source], [result]).wait()

    return timed(post, comm) / rounds


def wrong_values(comm: Communicator, measured: Sequence[Measured]) -> list[str]:
    """Return wrong results of any rank, one line each; all ranks call it."""
    mine = "; ".join(m.wrong for m in measured if m.wrong)
    texts = comm.all_ok(mine or None)
    return [f"{comm.backend}: rank {r}: {text}" for r, text in enumerate(texts) if text]


def table(measured: Sequence[Measured]) -> Table:
    """Return a table of this rank's times, and of the bytes per second that arrive at a rank."""
    rows = titled("all ranks", "backend", "what", right=("bytes", "time", "arrives per rank"))
    for m in measured:
        bandwidth = f"{size_text(round(m.bandwidth))}/s"
        rows.add_row(m.backend, m.what, size_text(m.size), time_text(m.seconds), bandwidth)
    return rows
