"""Composed communications: all ranks' steps in lockstep, against whole tensors in plain torch."""

from __future__ import annotations

import gc
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from mdfuse.backends.algorithms import (
    Composition,
    Copy,
    Piece,
    Reduce,
    Round,
    Sizes,
    Transfer,
    compose,
)
from mdfuse.backends.transfers import composer, transferred
from mdfuse.backends.work import DONE
from mdfuse.errors import CommunicationError
from mdfuse.layouts.call import Call

SIZES = range(2, 10)
EVERYTHING_SMALL = 1 << 30

sized = pytest.mark.parametrize("n", SIZES)
both_forms = pytest.mark.parametrize("small", [0, EVERYTHING_SMALL], ids=["large", "small"])
counted = pytest.mark.parametrize("k", [0, 1, 5, 16])


@dataclass
class Rank:
    """One rank: its buffers, the steps that are left, and what it waits for."""

    call: Call
    srcs: list[Tensor]
    dsts: list[Tensor]
    small: int
    steps: deque[Round] = field(default_factory=deque)
    waiting: deque[Transfer] = field(default_factory=deque)

    @property
    def is_in_place(self) -> bool:
        return bool(self.srcs and self.dsts) and self.srcs[0] is self.dsts[0]

    def __post_init__(self) -> None:
        sizes = Sizes(
            srcs=tuple(x.numel() for x in self.srcs),
            dsts=tuple(x.numel() for x in self.dsts),
            small=self.small,
        )
        composition = compose(self.call, sizes)
        self.steps.extend(composition.steps)
        self.scratch = torch.full((composition.scratch,), -999)

    def elements(self, piece: Piece) -> Tensor:
        sides = {"src": self.srcs, "dst": self.dsts, "scratch": [self.scratch]}
        buffer = sides[piece.side][piece.index]
        assert 0 <= piece.start <= piece.stop <= buffer.numel(), piece
        return buffer[piece.start : piece.stop]

    def begin(self, sent: dict[tuple[int, int], deque[Tensor]]) -> None:
        step = self.steps.popleft()
        for local in step.local:
            match local:
                case Copy(source, target):
                    self.elements(target).copy_(self.elements(source))
                case Reduce(rows, target):
                    operands = self.elements(rows).view(len(self.call.team), -1)
                    self.elements(target).copy_(operands.sum(0))
        for t in step.sends:
            assert t.peer != self.call.rank and t.piece.size
            sent[self.call.rank, t.peer].append(self.elements(t.piece).clone())
        self.waiting.extend(step.recvs)

    def receive(self, sent: dict[tuple[int, int], deque[Tensor]]) -> None:
        left: deque[Transfer] = deque()
        blocked = set()
        for t in self.waiting:
            queue = sent[t.peer, self.call.rank]
            if t.peer in blocked or not queue:
                blocked.add(t.peer)  # between two ranks messages keep their order
                left.append(t)
            else:
                self.elements(t.piece).copy_(queue.popleft())
        self.waiting = left


def run(ranks: Sequence[Rank]) -> None:
    """All ranks in lockstep until they are done; sources stay as they were."""
    before = [[x.clone() for x in rank.srcs] for rank in ranks]
    sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    for _ in range(100):
        for rank in ranks:
            if not rank.waiting and rank.steps:
                rank.begin(sent)
        for rank in ranks:
            rank.receive(sent)
    assert not any(rank.waiting or rank.steps for rank in ranks), "a rank waits for ever"
    assert not any(sent.values()), "something was sent that nobody received"
    for rank, kept in zip(ranks, before, strict=True):
        assert rank.is_in_place or all(map(torch.equal, rank.srcs, kept)), "a source was written"


def team_of(n: int) -> tuple[int, ...]:
    """Ranks in no order, with gaps."""
    return tuple(random.Random(n).sample(range(30), n))


def values(rank: int, k: int) -> Tensor:
    return torch.arange(k) + 1000 * rank


def empty(k: int) -> Tensor:
    return torch.full((k,), -1)


Buffers = tuple[list[Tensor], list[Tensor]]


def outcome(
    team: Sequence[int], small: int, call: Callable[[int], Call], buffers: Callable[[int], Buffers]
) -> dict[int, list[Tensor]]:
    """What each rank has in its destinations afterwards."""
    ranks = [Rank(call(r), *buffers(r), small) for r in team]
    run(ranks)
    return {rank.call.rank: rank.dsts for rank in ranks}


@sized
@counted
@both_forms
def test_allgather(n: int, k: int, small: int) -> None:
    team = team_of(n)
    got = outcome(
        team,
        small,
        lambda r: Call(kind="Allgather", team=team, rank=r),
        lambda r: ([values(r, k)], [empty(n * k)]),
    )
    whole = torch.cat([values(r, k) for r in team])
    assert all(torch.equal(dst, whole) for (dst,) in got.values())


@sized
@counted
def test_reduce_scatter(n: int, k: int) -> None:
    team = team_of(n)
    got = outcome(
        team,
        0,
        lambda r: Call(kind="ReduceScatter", team=team, rank=r, reduce_op="sum"),
        lambda r: ([values(r, n * k)], [empty(k)]),
    )
    total = reduce(torch.add, [values(r, n * k) for r in team])
    for i, r in enumerate(team):
        assert torch.equal(got[r][0], total[i * k : i * k + k])


@sized
@counted
@both_forms
@pytest.mark.parametrize("in_place", [False, True])
def test_allreduce(n: int, k: int, small: int, in_place: bool) -> None:
    team = team_of(n)

    def buffers(r: int) -> Buffers:
        src = values(r, k)
        return [src], [src if in_place else empty(k)]

    got = outcome(
        team,
        small,
        lambda r: Call(kind="Allreduce", team=team, rank=r, reduce_op="sum"),
        buffers,
    )
    total = reduce(torch.add, [values(r, k) for r in team])
    assert all(torch.equal(dst, total) for (dst,) in got.values())


@sized
@counted
@both_forms
def test_reduce_to_every_root(n: int, k: int, small: int) -> None:
    team = team_of(n)
    total = reduce(torch.add, [values(r, k) for r in team])
    for root in team:
        got = outcome(
            team,
            small,
            lambda r: Call(kind="Reduce", team=team, rank=r, root=root, reduce_op="sum"),  # noqa: B023
            lambda r: ([values(r, k)], [empty(k)] if r == root else []),  # noqa: B023
        )
        assert torch.equal(got[root][0], total)


@sized
@counted
def test_broadcast_from_every_root(n: int, k: int) -> None:
    team = team_of(n)
    for root in team:
        got = outcome(
            team,
            0,
            lambda r: Call(kind="Broadcast", team=team, rank=r, root=root),  # noqa: B023
            lambda r: ([values(r, k)], []) if r == root else ([], [empty(k)]),  # noqa: B023
        )
        assert all(torch.equal(got[r][0], values(root, k)) for r in team if r != root)


@pytest.mark.parametrize(("n", "steps"), [(2, 1), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_a_broadcast_takes_the_logarithm_of_the_team_in_steps(n: int, steps: int) -> None:
    def distance(rank: int) -> int:
        call = Call(kind="Broadcast", team=tuple(range(n)), rank=rank, root=0)
        recvs = compose(call, Sizes(srcs=(1,), dsts=(1,))).steps[0].recvs
        return 1 + distance(recvs[0].peer) if recvs else 0

    assert max(distance(rank) for rank in range(n)) <= steps


@sized
@counted
@pytest.mark.parametrize("is_part", [False, True])
def test_gather_and_scatter(n: int, k: int, is_part: bool) -> None:
    team = team_of(n)
    root, parts = team[-1], tuple(reversed(team if is_part else team[:-1]))
    got = outcome(
        team,
        0,
        lambda r: Call(kind="Gather", team=team, rank=r, root=root, parts=parts),
        lambda r: (
            [values(r, k)] if r in parts else [],
            [empty(len(parts) * k)] if r == root else [],
        ),
    )
    assert torch.equal(got[root][0], torch.cat([values(r, k) for r in parts]))

    blocks = tuple(1 + 2 * i for i in range(len(parts)))
    count = 2 * len(parts) + 3  # the last blocks go to nobody
    got = outcome(
        team,
        0,
        lambda r: Call(
            kind="Scatter",
            team=team,
            rank=r,
            root=root,
            parts=parts,
            blocks=blocks,
            source_blocks=count,
        ),
        lambda r: (
            [values(r, count * k)] if r == root else [],
            [empty(k)] if r in parts else [],
        ),
    )
    for r, block in zip(parts, blocks, strict=True):
        assert torch.equal(got[r][0], values(root, count * k)[block * k : block * k + k])


@sized
def test_alltoall_with_uneven_counts(n: int) -> None:
    team = team_of(n)
    counts = torch.tensor([[(3 * i + j) % 4 for j in range(n)] for i in range(n)])

    def call(r: int) -> Call:
        i = team.index(r)
        sends, recvs = tuple(counts[i].tolist()), tuple(counts[:, i].tolist())
        return Call(kind="AllToAll", team=team, rank=r, send_counts=sends, recv_counts=recvs)

    got = outcome(
        team,
        0,
        call,
        lambda r: (
            [values(r, sum(call(r).send_counts))],
            [empty(sum(call(r).recv_counts))],
        ),
    )
    sent = {r: values(r, sum(call(r).send_counts)).split(counts[i].tolist()) for i, r in _at(team)}
    for i, r in _at(team):
        assert torch.equal(got[r][0], torch.cat([sent[s][i] for s in team]))


def _at(team: Sequence[int]) -> list[tuple[int, int]]:
    return list(enumerate(team))


@sized
def test_exchange_keeps_the_order_between_two_ranks(n: int) -> None:
    """Each rank sends two pieces of different lengths to the next member, one to the one behind."""
    team = team_of(n)

    def near(r: int, by: int) -> int:
        return team[(team.index(r) + by) % n]

    got = outcome(
        team,
        0,
        lambda r: Call(
            kind="Exchange",
            team=team,
            rank=r,
            sends=(near(r, 1), near(r, -1), near(r, 1)),
            recvs=(near(r, -1), near(r, -1), near(r, 1)) if n > 2 else (near(r, 1),) * 3,
        ),
        lambda r: (
            [values(r, 2), values(r, 3), values(r, 4)],
            [empty(2), empty(4), empty(3)] if n > 2 else [empty(2), empty(3), empty(4)],
        ),
    )
    for r in team:
        before, behind = near(r, -1), near(r, 1)
        expected = [values(before, 2), values(before, 4), values(behind, 3)]
        if n == 2:
            expected = [values(before, 2), values(before, 3), values(before, 4)]
        assert all(map(torch.equal, got[r], expected))


@pytest.mark.parametrize(
    ("kind", "root"), [("Allgather", None), ("Allreduce", None), ("Reduce", 5), ("Broadcast", 5)]
)
def test_a_team_of_one_keeps_what_it_has(kind: str, root: int | None) -> None:
    call = Call(kind=kind, team=(5,), rank=5, root=root, reduce_op="sum")
    dsts = [] if kind == "Broadcast" else [empty(3)]
    rank = Rank(call, [values(5, 3)], dsts, 0)
    run([rank])
    assert all(torch.equal(x, values(5, 3)) for x in rank.dsts)


@pytest.mark.parametrize("kind", ["Broadcast", "Reduce", "Gather", "Scatter"])
def test_a_root_outside_the_team(kind: str) -> None:
    call = Call(kind=kind, team=(0, 1), rank=0, root=7, reduce_op="sum", parts=(0,), blocks=(0,))
    with pytest.raises(CommunicationError, match=f"{kind} on team \\(0, 1\\) has root 7"):
        compose(call, Sizes(srcs=(1,), dsts=(1,)))


def test_an_unknown_kind() -> None:
    with pytest.raises(CommunicationError, match="Gossip is not a kind of communication"):
        compose(Call(kind="Gossip", team=(0, 1), rank=0), Sizes(srcs=(1,), dsts=(1,)))


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("Allgather", Sizes(srcs=(4,), dsts=(7,)), "has a dst of 7 elements, and needs 8"),
        ("ReduceScatter", Sizes(srcs=(7,), dsts=(4,)), "has a src of 7 elements, and needs 8"),
        ("Allreduce", Sizes(srcs=(4,), dsts=(3,), small=99), "has a dst of 3 elements"),
    ],
)
def test_buffers_that_are_too_small(kind: str, sizes: Sizes, words: str) -> None:
    call = Call(kind=kind, team=(0, 1), rank=1, reduce_op="sum")
    with pytest.raises(CommunicationError, match=words):
        compose(call, sizes)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_that_arrive(n: int) -> None:
    """As many as have to, in the large forms: (n-1)/n of the whole, twice where it comes back."""

    def arriving(kind: str, srcs: int, dsts: int) -> int:
        call = Call(kind=kind, team=tuple(range(n)), rank=0, root=0, reduce_op="sum")
        steps = compose(call, Sizes(srcs=(srcs,), dsts=(dsts,))).steps
        return sum(t.piece.size for step in steps for t in step.recvs)

    k = 6 * n
    assert arriving("Allgather", k, n * k) == (n - 1) * k
    assert arriving("ReduceScatter", n * k, k) == (n - 1) * k
    assert arriving("Allreduce", k, k) == 2 * (n - 1) * k // n
    assert arriving("Reduce", k, k) == 2 * (n - 1) * k // n


@pytest.mark.parametrize("kind", ["Allgather", "Allreduce", "ReduceScatter", "Reduce", "AllToAll"])
def test_a_team_of_one_copies(kind: str) -> None:
    call = Call(kind=kind, team=(3,), rank=3, root=3, reduce_op="sum")
    composition = compose(call, Sizes(srcs=(4,), dsts=(4,)))
    assert composition.steps == (Round(local=(Copy(Piece("src", 0, 4), Piece("dst", 0, 4)),)),)
    assert not composition.scratch


def in_this_process(call: Callable[[int], Call], buffers: dict[int, list[list[Tensor]]]) -> None:
    """Every rank posts in one step, by `transferred`; what was sent arrives before the waits."""
    sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    team, awaited, works = call(0).team, [], []
    for i, rank in enumerate(team):

        def transfer(recvs: Any, sends: Any, i: int = i) -> list[Any]:
            awaited.extend((i, peer, x) for peer, x in recvs)
            for peer, x in sends:
                sent[i, peer].append(x.clone())
            return [DONE]

        works.append(transferred(call(rank), transfer)(*buffers[rank]))
    for i, peer, x in awaited:
        x.copy_(sent[peer, i].popleft().view_as(x))
    assert not any(sent.values())
    for work in works:
        work.wait()


@pytest.mark.parametrize("kind", ["Allreduce", "ReduceScatter", "Reduce", "Allgather", "AllToAll"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16], ids=str)
def test_in_one_step(kind: str, dtype: torch.dtype) -> None:
    """For libraries without a call for it: pieces of larger buffers, operands, a reduction."""
    team, k = (2, 0, 1), 4
    n, op = len(team), "max"
    generator = torch.Generator().manual_seed(0)
    long = kind in ("ReduceScatter", "AllToAll")
    values = {
        r: torch.randint(0, 2, (n * k if long else k,), generator=generator).to(dtype) for r in team
    }
    rows = torch.stack([values[r] for r in team]).view(n, -1)
    total = rows.int().amax(0).to(dtype)
    blocks = list(rows.view(n, -1, k).transpose(0, 1).reshape(-1, n * k)) if long else []
    expected = {
        "Allreduce": [total] * n,
        "ReduceScatter": list(total.split(k)),
        "Reduce": [None, total, None],
        "Allgather": [rows.view(-1)] * n,
        "AllToAll": blocks,
    }[kind]
    pairs = zip(team, expected, strict=True)
    dsts = {r: [] if want is None else [torch.zeros_like(want)] for r, want in pairs}
    in_this_process(
        lambda r: Call(kind=kind, team=team, rank=r, root=0, reduce_op=op),
        {r: [[values[r].view(2, -1)], dsts[r]] for r in team},
    )
    for rank, want in zip(team, expected, strict=True):
        assert want is None or torch.equal(dsts[rank][0], want)


class Made:
    """What is kept for a composition."""


def test_compositions_of_the_last_sizes_are_kept() -> None:
    """Sizes that change from run to run do not fill the memory."""
    alive: weakref.WeakSet[Made] = weakref.WeakSet()
    sizes = []

    def make(composition: Composition, of: Sizes) -> Made:
        made = Made()
        alive.add(made)
        sizes.append(of.srcs)
        return made

    post = composer(Call(kind="Broadcast", team=(0, 1), rank=0, root=0), make)
    for n in (*range(1, 500), 499, 498, 499):
        post([torch.zeros(n)], [])
    gc.collect()
    assert sizes == [(n,) for n in range(1, 500)]  # the last ones are not made again
    assert 2 <= len(alive) <= 32


def test_several_steps_are_refused() -> None:
    call = Call(kind="Broadcast", team=(0, 1, 2, 3), rank=2, root=0)
    with pytest.raises(CommunicationError, match="takes several steps"):
        transferred(call, lambda recvs, sends: [])([], [torch.zeros(3)])
