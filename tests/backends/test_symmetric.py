"""Windows without a GPU: the moves of ranks in one process, on fake streams and on threads."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mdfuse.backends.algorithms import Sizes, compose
from mdfuse.backends.symmetric.cuda_team import CudaTeam, CudaWindow
from mdfuse.backends.symmetric.moves import Shape, Stage, Take, kind_of, moves
from mdfuse.backends.symmetric.posts import Buffers
from mdfuse.layouts.call import Call

TEAMS = [(0, 1), (2, 0, 1), (3, 1, 0, 2)]


class FakeLane:
    """A stream as a queue of functions, each of which returns whether it could be carried out."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()

    def begin(self) -> None:
        return None

    def copy(self, target: int, source: int, size: int) -> None:
        self.queue.append(lambda: ctypes.memmove(target, source, size) is not None)

    def write(self, word: int, value: int) -> None:
        def write() -> bool:
            ctypes.c_uint32.from_address(word).value = value
            return True

        self.queue.append(write)

    def wait(self, word: int, value: int) -> None:
        self.queue.append(lambda: ctypes.c_uint32.from_address(word).value == value)

    def do(self, work: Callable[[], object]) -> None:
        self.queue.append(lambda: work() is None)

    def end(self) -> Callable[[], None]:
        return lambda: None


class World:
    """The ranks of a team, whose streams take turns."""

    def __init__(self, team: tuple[int, ...], slot: int) -> None:
        self.team, self.shape = team, Shape(members=len(team), slot=slot)
        self.memory = [torch.zeros(self.shape.bytes, dtype=torch.uint8) for _ in team]
        self.words = [torch.zeros(self.shape.words, dtype=torch.int32) for _ in team]
        windows = [
            CudaWindow(words=w.data_ptr(), slots=m.data_ptr())
            for w, m in zip(self.words, self.memory, strict=True)
        ]
        self.lanes = [FakeLane() for _ in team]
        self.teams = [
            CudaTeam(own=i, windows=windows, lane=lane) for i, lane in enumerate(self.lanes)
        ]
        self.kept: list[Any] = []

    def post(self, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor], small: int) -> None:
        sent, received = (tuple(x.numel() for x in side) for side in (srcs, dsts))
        sizes = Sizes(srcs=sent, dsts=received, small=small, is_open=True)
        composition = compose(call, sizes)
        first = (*srcs, *dsts)[0]
        made = moves(call, composition, first.itemsize, self.shape)
        buffers = Buffers(srcs, dsts, first.new_empty(composition.scratch))
        self.kept.append(buffers)
        notes = (lambda: None), (lambda: None)
        self.teams[self.team.index(call.rank)].post(call, made, buffers, notes)

    def run(self) -> None:
        """Carry everything out, a random stream at a time; a deadlock is an error."""
        draw = torch.Generator().manual_seed(len(self.team))
        while any(lane.queue for lane in self.lanes):
            before = sum(len(lane.queue) for lane in self.lanes)
            for i in torch.randperm(len(self.lanes), generator=draw).tolist():
                queue = self.lanes[i].queue
                for _ in range(int(torch.randint(1, 9, (1,), generator=draw))):
                    if queue and queue[0]():
                        queue.popleft()
            assert sum(len(lane.queue) for lane in self.lanes) < before, "the streams stand still"
        assert not any(w.any() for w in self.words), "something was staged that nobody took"


def drawn(rank: int, count: int) -> Tensor:
    return torch.randint(-99, 99, (count,), generator=torch.Generator().manual_seed(rank)).float()


@pytest.mark.parametrize("team", TEAMS, ids=str)
@pytest.mark.parametrize("count", [1, 5, 3000])
@pytest.mark.parametrize("small", [0, 1 << 20], ids=["in two steps", "in one step"])
def test_streams_move_and_reduce(team: tuple[int, ...], count: int, small: int) -> None:
    """Kinds one after the other, several times over: chunks of a slot, and words used again."""
    n, here = len(team), World(team, slot=4096)
    operands = [drawn(r, n * count) for r in team]
    total = torch.stack(operands).sum(0)
    found: dict[int, list[Tensor]] = {}
    for _ in range(2):
        for i, rank in enumerate(team):
            src = operands[i]
            got = [torch.zeros(size) for size in (n * n * count, count, n * count, n * count)]
            bring = torch.zeros(n * count) if i else src.clone()
            found[rank] = [*got, bring]
            call = partial(Call, team=team, rank=rank)
            here.post(call(kind="Allgather"), [src], got[:1], small)
            here.post(call(kind="ReduceScatter", reduce_op="sum"), [src], got[1:2], small)
            here.post(call(kind="Allreduce", reduce_op="sum"), [src], got[2:3], small)
            counts = (count,) * n
            to_all = call(kind="AllToAll", send_counts=counts, recv_counts=counts)
            here.post(to_all, [src], got[3:], small)
            side = ([bring], []) if i == 0 else ([], [bring])
            here.post(call(kind="Broadcast", root=team[0]), *side, small)
        here.run()
    for i, rank in enumerate(team):
        mine = slice(i * count, i * count + count)
        expected = [torch.cat(operands), total[mine], total, torch.cat([x[mine] for x in operands])]
        for got, want in zip(found[rank], [*expected, operands[0]], strict=True):
            assert torch.equal(got, want)


def test_uneven_pieces_between_pairs() -> None:
    """Two pieces one way, a large one back, and one rank that nobody sends to."""
    here = World((0, 1, 2), slot=2048)
    given = {0: [drawn(3, 700), drawn(4, 1)], 1: [drawn(5, 2000)], 2: [drawn(6, 9)]}
    sends = {0: (1, 1), 1: (0,), 2: (1,)}
    recvs = {0: (1,), 1: (0, 0, 2), 2: ()}
    into = {0: [2000], 1: [700, 1, 9], 2: []}
    got = {rank: [torch.zeros(k) for k in sizes] for rank, sizes in into.items()}
    for rank in range(3):
        call = Call(
            kind="Exchange", team=(0, 1, 2), rank=rank, sends=sends[rank], recvs=recvs[rank]
        )
        here.post(call, given[rank], got[rank], 0)
    here.run()
    assert torch.equal(got[0][0], given[1][0])
    for found, want in zip(got[1], [*given[0], given[2][0]], strict=True):
        assert torch.equal(found, want)


def test_what_all_need_is_staged_once() -> None:
    """Four chunks of an all-gather, for both readers at once, in two slots in turn."""
    call, shape = Call(kind="Allgather", team=(0, 1, 2), rank=1), Shape(members=3, slot=1024)
    composition = compose(call, Sizes(srcs=(1000,), dsts=(3000,), is_open=True))
    made = moves(call, composition, 4, shape)
    staged = [m for m in made if isinstance(m, Stage)]
    assert [(m.start, m.bytes) for m in staged] == [
        (0, 1024),
        (1024, 1024),
        (2048, 1024),
        (3072, 928),
    ]
    assert [m.place for m in staged] == [0, 1024, 0, 1024]
    assert all(sorted(m.readers) == [0, 2] for m in staged)
    assert sum(m.bytes for m in made if isinstance(m, Take)) == 8000
    assert {kind_of(m.tag) for m in staged} == {"Allgather"}
