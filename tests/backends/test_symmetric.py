"""Outboxes without a GPU: ranks in one process, on fake streams and in memory of the host."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse.backends.algorithms import Sizes, compose
from mdfuse.backends.base import Work
from mdfuse.backends.symmetric.cuda_sites import Sited, Sites, numbering
from mdfuse.backends.symmetric.cuda_sums import OneKernel, whole
from mdfuse.backends.symmetric.cuda_team import CudaOutbox, CudaTeam, CudaWork, Half, LaneOrder
from mdfuse.backends.symmetric.host_memory import Card
from mdfuse.backends.symmetric.outbox_moves import (
    TURNS,
    Put,
    Shape,
    Show,
    Take,
    kind_of,
    moves,
    pieces,
)
from mdfuse.backends.symmetric.post_buffers import Buffers
from mdfuse.backends.symmetric.symmetric_backend import SymmetricBackend, SymmetricPoster
from mdfuse.backends.teams import team_key
from mdfuse.backends.work import DONE
from mdfuse.errors import BackendError, CommunicationError
from mdfuse.interpreter.processes import Process, this_process
from mdfuse.layouts.call import Call
from mdfuse.runtime.backend_rows import why_not
from mdfuse.torch_private import HashStore, PrefixStore

TEAMS = [(0, 1), (2, 0, 1), (3, 1, 0, 2)]


class FakeLane:
    """A stream as a queue of functions, each of which returns whether it could be carried out.

    Others see writes of words late, but before what it writes next.
    """

    current: FakeLane | None = None

    def __init__(self) -> None:
        self.asked = 0
        self.queue: deque[Callable[[], bool]] = deque()
        self.capture = 0
        self.late: tuple[int, int] | None = None

    def arrive(self) -> None:
        """Let others see what was written last."""
        if self.late is not None:
            word, value = self.late
            ctypes.c_uint32.from_address(word).value = value
        self.late = None

    def begin(self) -> None:
        return None

    def copy(self, target: int, source: int, size: int) -> None:
        self.queue.append(lambda: ctypes.memmove(target, source, size) is not None)

    def write(self, word: int, value: int) -> None:
        def write() -> bool:
            self.arrive()
            self.late = word, value
            return True

        self.queue.append(write)

    def wait(self, word: int, value: int) -> None:
        def wait() -> bool:
            found = ctypes.c_uint32.from_address(word).value
            if self.late is not None and self.late[0] == word:
                found = self.late[1]
            return found == value

        self.queue.append(wait)

    def make(self, work: Callable[[], Any]) -> Any:
        FakeLane.current = self
        made = work()
        FakeLane.current = None
        return made

    def do(self, work: Callable[[], object]) -> None:
        self.queue.append(lambda: work() is None)

    def end(self) -> Callable[[], None]:
        done: list[bool] = []

        def record() -> bool:
            self.arrive()
            done.append(True)
            return True

        self.queue.append(record)

        def join() -> None:
            if FakeLane.current is not None:
                FakeLane.current.queue.append(lambda: bool(done))

        return join

    def era(self) -> int:
        self.asked += 1
        return self.capture


class FakeDevice:
    """Events between such streams."""

    def event(self) -> list[list[bool]]:
        return []

    def stream(self, handle: FakeLane) -> FakeLane:
        return handle

    def current_stream(self) -> FakeLane:
        assert FakeLane.current is not None
        return FakeLane.current

    def record(self, event: list[list[bool]], stream: FakeLane) -> None:
        done: list[bool] = []
        event.append(done)
        stream.queue.append(lambda: not done.append(True))  # type: ignore[func-returns-value]

    def wait(self, stream: FakeLane, event: list[list[bool]], flags: int) -> None:
        done = event[-1]
        stream.queue.append(lambda: bool(done))


class FakeHeap:
    """All memory of this process, which the others have open, but for what is kept out."""

    def __init__(self) -> None:
        self.out: set[int] = set()
        self.asked = 0

    def find(self, address: int) -> tuple[str, int] | None:
        self.asked += 1
        return None if address in self.out else ("all", address)

    def open(self, handle: str) -> int:
        assert handle == "all"
        return 0


class World:
    """The ranks of a team, whose streams take turns."""

    def __init__(self, team: tuple[int, ...], slot: int) -> None:
        self.team, self.shape = team, Shape(members=len(team), slot=slot)
        self.memory = [torch.zeros(self.shape.bytes, dtype=torch.uint8) for _ in team]
        self.words = [torch.zeros(self.shape.words, dtype=torch.int32) for _ in team]
        self.signals = [torch.zeros(self.shape.signals, dtype=torch.int32) for _ in team]
        outboxes = [
            CudaOutbox(words=w.data_ptr(), slots=m.data_ptr(), signals=s.data_ptr())
            for w, m, s in zip(self.words, self.memory, self.signals, strict=True)
        ]
        of_ranks = [[FakeLane() for _ in ("lane", "tell", "watch", "behind")] for _ in team]
        self.lanes = [lane for lanes in of_ranks for lane in lanes]
        self.teams = [
            CudaTeam(
                index=i,
                outboxes=outboxes,
                turns=LaneOrder(FakeDevice()),  # type: ignore[arg-type]
                lane=lane,
                tell=tell,
                watch=watch,
                behind=behind,
            )
            for i, (lane, tell, watch, behind) in enumerate(of_ranks)
        ]
        self.works: list[Any] = []
        self.shown = self.showing = 0
        self.numbers: list[Any] = []
        self.told: list[Any] = [{} for _ in team]
        self.store, self.heaps = HashStore(), [FakeHeap() for _ in team]
        self.sites = [
            Sites(index=i, heap=heap, store=self.store, timeout_s=1.0)  # type: ignore[arg-type]
            for i, heap in enumerate(self.heaps)
        ]

    def begin_run(self) -> None:
        """Let the next posts be those of a run of one program, of which each rank has a plan."""
        self.numbers = [numbering(7) for _ in self.team]

    def post(self, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor], small: int) -> None:
        sent, received = (tuple(x.numel() for x in side) for side in (srcs, dsts))
        sizes = Sizes(srcs=sent, dsts=received, small=small, is_open=True)
        composition = compose(call, sizes)
        first = (*srcs, *dsts)[0]
        how = call, composition, first.itemsize, self.shape
        made = moves(*how)
        if self.numbers:
            own = self.team.index(call.rank)
            site = self.numbers[own](call)
            if site is not None:
                sited = Sited(
                    call=call,
                    site=site,
                    tellings=self.told[own],
                    pieces=pieces(call, composition, "sends"),
                    remade=partial(moves, *how),
                )
                made = self.sites[own].moves(sited, made, srcs, dsts)
            shown = sum(isinstance(move, Show) for move in made)
            self.shown, self.showing = self.shown + shown, self.showing + bool(shown)
        buffers = partial(Buffers.of, srcs, dsts, composition.scratch)
        notes = (lambda: None), (lambda: None)
        team = self.teams[self.team.index(call.rank)]
        self.works.append(team.post(call, made, buffers, notes))

    def run(self, slow: int | None = None) -> None:
        """Carry everything out, parts of streams in a random order; a deadlock is an error.

        Args:
            slow: the stream that makes a step while each other one makes all that it can; None:
                each makes some.
        """
        draw = torch.Generator().manual_seed(len(self.team))
        while any(lane.queue for lane in self.lanes):
            before = sum(len(lane.queue) for lane in self.lanes)
            is_late = any(lane.late for lane in self.lanes)
            for i in torch.randperm(len(self.lanes), generator=draw).tolist():
                lane = self.lanes[i]
                some = int(torch.randint(1, 9, (1,), generator=draw))
                for _ in range(some if slow is None else 1 if i == slow else len(lane.queue)):
                    if lane.queue and lane.queue[0]():
                        lane.queue.popleft()
            for i in torch.randperm(len(self.lanes), generator=draw).tolist()[::2]:
                self.lanes[i].arrive()
            after = sum(len(lane.queue) for lane in self.lanes)
            assert is_late or after < before, "the streams stand still"
        for lane in self.lanes:
            lane.arrive()
        words = (*self.words, *self.signals)
        assert not any(w.any() for w in words), "something was put that nobody took"


def drawn(rank: int, count: int) -> Tensor:
    return torch.randint(-99, 99, (count,), generator=torch.Generator().manual_seed(rank)).float()


def test_a_post_is_queued_as_one_kernel() -> None:
    """Through the lane of the team, in the order of its other posts, on flat elements."""
    world, call = World((0, 1), 1 << 12), Call(kind="Allreduce", team=(0, 1), rank=0)
    x, y = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    given: list[tuple[Tensor, Tensor]] = []

    def add(src: Tensor, dst: Tensor) -> None:
        given.append((src, dst))
        dst.copy_(2 * src)

    buffers = Buffers.of((x,), (y,), 0)
    notes = (lambda: None), (lambda: None)
    work = world.teams[0].post(
        call, (OneKernel(pieces=whole([x], [y]), run=add),), lambda: buffers, notes
    )
    assert not given
    world.run()
    work.wait()
    ((src, dst),) = given
    assert src.shape == dst.shape == (6,) and torch.equal(y, 2 * x)


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


def test_what_all_need_is_put_once() -> None:
    """Four chunks of an all-gather, for both readers at once, in two slots in turn."""
    call, shape = Call(kind="Allgather", team=(0, 1, 2), rank=1), Shape(members=3, slot=1024)
    composition = compose(call, Sizes(srcs=(1000,), dsts=(3000,), is_open=True))
    made = moves(call, composition, 4, shape)
    sent = [m for m in made if isinstance(m, Put)]
    assert [(m.start, m.bytes) for m in sent] == [
        (0, 1024),
        (1024, 1024),
        (2048, 1024),
        (3072, 928),
    ]
    assert [m.place for m in sent] == [0, 1024, 0, 1024]
    assert all(sorted(m.readers) == [0, 2] for m in sent)
    assert sum(m.bytes for m in made if isinstance(m, Take)) == 8000
    assert {kind_of(m.tag) for m in sent} == {"Allgather"}


@pytest.mark.parametrize("team", TEAMS, ids=str)
@pytest.mark.parametrize("small", [0, 1 << 20], ids=["in two steps", "in one step"])
def test_streams_show_what_others_copy(team: tuple[int, ...], small: int) -> None:
    """From the second run on, what is sent is shown; what is reduced on the way is not.

    Where it lies is looked for once, and what was told of that is forgotten.
    """
    n, count, here = len(team), 700, World(team, slot=4096)
    operands = [drawn(r, n * count) for r in team]
    got = [[torch.zeros(x) for x in (n * n * count, count, n * count, n * count)] for _ in team]
    here.heaps[1].out.add(operands[1].data_ptr())
    asked = []
    for run in range(4):
        here.begin_run()
        before = here.shown
        for i, rank in enumerate(team):
            operands[i].copy_(drawn(rank + run * 50, n * count))
            call = partial(Call, team=team, rank=rank)
            here.post(call(kind="Allgather"), [operands[i]], got[i][:1], small)
            here.post(
                call(kind="ReduceScatter", reduce_op="sum"), [operands[i]], got[i][1:2], small
            )
            here.post(call(kind="Allreduce", reduce_op="sum"), [operands[i]], got[i][2:3], small)
            counts = (count,) * n
            to_all = call(kind="AllToAll", send_counts=counts, recv_counts=counts)
            here.post(to_all, [operands[i]], got[i][3:], small)
        here.run()
        assert (here.shown > before) == (run > 0)
        assert (here.store.num_keys() > 0) == (run == 0)
        asked.append([heap.asked for heap in here.heaps])
        total = torch.stack(operands).sum(0)
        for i in range(n):
            mine = slice(i * count, i * count + count)
            want = [torch.cat(operands), total[mine], total, torch.cat([x[mine] for x in operands])]
            assert all(torch.equal(a, b) for a, b in zip(got[i], want, strict=True))
            got[i][0].zero_(), got[i][3].zero_()
    assert asked == [asked[0]] * 4 and all(asked[0])
    # each post that shows asks the driver once whether it is captured, a rank's first once more
    asks = [lane.asked for lane in here.lanes[1::4] if lane.asked]
    assert sum(asks) == here.showing + len(asks)


def test_pairs_show_uneven_pieces() -> None:
    """Pieces that are shown beside others, none, many one after the other, and one rank idle."""
    here = World((0, 1, 2), slot=2048)
    given = {0: [drawn(3, 700), drawn(4, 1), drawn(8, 0)], 1: [drawn(5, 2000)], 2: [drawn(6, 9)]}
    here.heaps[0].out.add(given[0][0].data_ptr())
    sends = {0: (1, 1, 1), 1: (0,), 2: (1,)}
    recvs = {0: (1,), 1: (0, 0, 0, 2), 2: ()}
    into = {0: [2000], 1: [700, 1, 0, 9], 2: []}
    got = {rank: [torch.zeros(k) for k in sizes] for rank, sizes in into.items()}
    for run in range(3):
        here.begin_run()
        for turn in range(5):
            for rank in (2, 0, 1) if turn % 2 else (0, 1, 2):
                call = Call(
                    kind="Exchange", team=(0, 1, 2), rank=rank, sends=sends[rank], recvs=recvs[rank]
                )
                here.post(call, given[rank], got[rank], 0)
        here.run()
        assert here.shown == run * 5 * 3
        assert torch.equal(got[0][0], given[1][0])
        for found, want in zip(got[1], [*given[0], given[2][0]], strict=True):
            assert torch.equal(found, want)
        for rank, some in given.items():
            for x in some:
                x.copy_(drawn(rank + 20 + run, x.numel()))


def test_signals_are_used_again() -> None:
    """More posts than there are signals, and buffers: each waits for what it moves, made just
    before, where readers have taken what was there.

    In each run but the first another stream is far behind the others.
    """
    here, count, buffers = World((0, 1), slot=4096), 30, TURNS + 3
    pairs = [(rank, n) for rank in (0, 1) for n in range(count)]
    given = {(rank, n): torch.zeros(9) for rank in (0, 1) for n in range(buffers)}
    got = {pair: torch.zeros(9) for pair in pairs}
    for run in range(1 + len(here.lanes)):
        here.begin_run()
        made = {(rank, n): drawn(100 * run + 40 * rank + n, 9) for rank, n in pairs}
        for rank, n in pairs:
            team, source = here.teams[rank], given[rank, n % buffers]
            maker = team.tell if run else team.lane  # at first it goes through outboxes
            if n >= buffers:
                maker.make(here.works[-buffers].sent.join)
            maker.do(partial(fill, source, made[rank, n]))
            others = (1 - rank,)
            call = Call(kind="Exchange", team=(0, 1), rank=rank, sends=others, recvs=others)
            here.post(call, [source], [got[rank, n]], 0)
        here.run(slow=run - 1 if run else None)
        assert here.shown == run * len(pairs)
        assert all(torch.equal(got[rank, n], made[1 - rank, n]) for rank, n in pairs)


def fill(into: Tensor, values: Tensor) -> None:
    into.copy_(values)


def test_replays_and_eager_posts_take_turns() -> None:
    """A program, or its caller, may have no order between them; each needs its own tags."""
    world = World((0, 1), 1024)
    sources = [drawn(n, 24) for n in range(9)]
    kept = [torch.full_like(x, torch.nan) for x in sources]

    def broadcast(n: int, rank: int) -> None:
        srcs, dsts = ([sources[n]], []) if rank == 0 else ([], [kept[n]])
        world.post(Call(kind="Broadcast", team=(0, 1), rank=rank, root=0), srcs, dsts, 0)

    for rank, team in enumerate(world.teams):
        lane, caller, other = team.lane, FakeLane(), FakeLane()
        world.lanes += [caller, other]
        captured = []
        for n in (0, 1):
            team.lane, caller.capture = caller, 1  # type: ignore[assignment]
            broadcast(n, rank)
            team.lane, caller.capture = lane, 0
            captured.append([*caller.queue])
            caller.queue.clear()
        for n, stream in ((0, caller), (2, None), (3, None), (1, caller), (0, other), (4, None)):
            if stream is None:
                broadcast(n, rank)
                continue
            stream.make(team.turns.before)
            stream.queue.extend(captured[n])
            stream.make(team.turns.behind)
    world.run()
    assert all(map(torch.equal, sources[:5], kept[:5]))


def test_what_is_shown_does_not_move() -> None:
    here, call = World((0, 1), slot=4096), Call(kind="Allgather", team=(0, 1), rank=0)
    for x in (drawn(0, 8), drawn(1, 8)):
        here.begin_run()
        if here.works:
            with pytest.raises(BackendError, match="rank 0 sends from another place than before"):
                here.post(call, [x], [torch.zeros(16)], 0)
        else:
            here.post(call, [x], [torch.zeros(16)], 0)


def test_who_does_not_tell_where_it_lies() -> None:
    here, x, y = World((0, 1), slot=4096), drawn(0, 8), torch.zeros(16)
    call = Call(kind="Allgather", team=(0, 1), rank=0)
    here.begin_run()
    here.post(call, [x], [y], 0)
    here.begin_run()
    here.sites[0].timeout_s = 0.05
    with pytest.raises(BackendError, match=r"cannot connect rank 0 with the team \(0, 1\)"):
        here.post(call, [x], [y], 0)


def test_who_moves_nothing_tells_too() -> None:
    """Five rows, then six columns, in four parts: one rank has none, and the others ask it.

    Whether there is anything to tell, the team knows.
    """
    posted: list[int] = []

    def poster(call: Call, size: int, sited: Sited | None) -> Callable[..., Work]:
        return lambda moves, *_: posted.append(len(moves)) or DONE

    call = Call(kind="AllToAll", team=(0, 1, 2, 3), rank=3)
    team, nothing = SimpleNamespace(poster=poster), torch.zeros(0)
    site, shape = numbering(7)(call), Shape(members=4, slot=4096)
    for at in (site, None):
        SymmetricPoster(call, team, shape, at, {})([nothing], [nothing])  # type: ignore[arg-type]
    assert posted == [0, 0]


# -- in memory of the host -------------------------------------------------------------------------


def two_ranks() -> Iterator[tuple[SymmetricBackend, SymmetricBackend]]:
    """Two ranks in this process, with a team."""
    store = HashStore()
    ranks = [
        SymmetricBackend(rank=r, device=torch.device("cpu"), store=store, timeout_s=0.3)
        for r in (0, 1)
    ]
    joined(*(partial(backend.prepare, [(0, 1)]) for backend in ranks))
    yield ranks[0], ranks[1]
    for backend in ranks:
        backend.close()


pair = pytest.fixture(name="pair")(two_ranks)


def joined(*works: Callable[[], object]) -> list[Any]:
    """What functions that wait for each other return, or raise."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        return [future.exception() or future.result() for future in futures]


def gather(backend: SymmetricBackend, src: Tensor, dst: Tensor) -> Work:
    call = Call(kind="Allgather", team=(0, 1), rank=backend.rank)
    return backend.bind(call)([src], [dst])


def test_waits_in_any_order(pair: tuple[SymmetricBackend, SymmetricBackend]) -> None:
    """Neither rank waits before the other has posted; one process makes the moves of both."""
    sources = [[drawn(10 * turn + r, 900_000) for r in (0, 1)] for turn in range(3)]
    got = [[torch.zeros(1_800_000) for _ in (0, 1)] for _ in range(3)]

    def run(rank: int) -> None:
        works = [gather(pair[rank], sources[t][rank], got[t][rank]) for t in range(3)]
        for work in works if rank else reversed(works):
            work.wait()
            work.wait()

    assert joined(partial(run, 0), partial(run, 1)) == [None, None]
    for turn in range(3):
        for rank in (0, 1):
            assert torch.equal(got[turn][rank], torch.cat(sources[turn]))


def test_several_dtypes(pair: tuple[SymmetricBackend, SymmetricBackend]) -> None:
    """A group of sends and receives carries all bytes of each buffer; a sum has one dtype."""
    sent = [[drawn(r, 3), drawn(r, 40_000).double(), torch.tensor([r == 0])] for r in (0, 1)]
    got = [[torch.full_like(x, 1) for x in sent[1 - r]] for r in (0, 1)]

    def run(rank: int) -> None:
        peers = (1 - rank,) * 3
        call = Call(kind="Exchange", team=(0, 1), rank=rank, sends=peers, recvs=peers)
        pair[rank].bind(call)(sent[rank], got[rank]).wait()

    assert joined(partial(run, 0), partial(run, 1)) == [None, None]
    for rank in (0, 1):
        assert all(map(torch.equal, got[rank], sent[1 - rank]))
    call = Call(kind="Allreduce", team=(0, 1), rank=0, reduce_op="sum")
    for other in (torch.float64, torch.int32):
        with pytest.raises(CommunicationError, match="Allreduce on team \\(0, 1\\): dtypes"):
            pair[0].bind(call)([torch.ones(3)], [torch.ones(3, dtype=other)])


def test_a_rank_that_does_not_come_is_named(
    pair: tuple[SymmetricBackend, SymmetricBackend],
) -> None:
    """And the team takes no more posts, whoever made the one that failed."""
    first, second = (gather(pair[0], torch.ones(4), torch.zeros(8)) for _ in range(2))
    with pytest.raises(BackendError, match=r"an earlier Allgather .* after 0\.3 s .* rank 1"):
        second.wait()
    for _ in range(2):
        with pytest.raises(BackendError, match="Allgather failed on rank 0"):
            first.wait()
    with pytest.raises(BackendError, match=r"rank 0 cannot post Allgather on team .* any more"):
        gather(pair[0], torch.ones(4), torch.zeros(8))


def test_another_communication_in_its_place(
    pair: tuple[SymmetricBackend, SymmetricBackend],
) -> None:
    call = Call(kind="Broadcast", team=(0, 1), rank=1, root=1)
    pair[1].bind(call)([torch.ones(4)], []).wait()
    with pytest.raises(BackendError, match="rank 1 has posted Broadcast in its place"):
        gather(pair[0], torch.ones(4), torch.zeros(8)).wait()


def test_another_size(pair: tuple[SymmetricBackend, SymmetricBackend]) -> None:
    gather(pair[1], torch.ones(5), torch.zeros(10))
    with pytest.raises(BackendError, match="rank 1 has posted another size"):
        gather(pair[0], torch.ones(4), torch.zeros(8)).wait()


def test_another_thread_ends_a_wait(pair: tuple[SymmetricBackend, SymmetricBackend]) -> None:
    pair[0]._teams[0, 1].timeout_s = 60  # type: ignore[attr-defined]
    work, is_over = gather(pair[0], torch.ones(4), torch.zeros(8)), threading.Event()

    def wait() -> None:
        try:
            work.wait()
        finally:
            is_over.set()

    def abort() -> bool:
        while not is_over.wait(0.01):
            assert pair[0].abort()
        return True

    error, _ = joined(wait, abort)
    assert "another rank does not take part" in str(error)


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    """A process of this host."""
    started = subprocess.Popen(["sleep", "600"])
    began = Path(f"/proc/{started.pid}/stat").read_text().rpartition(") ")[2].split()[19]
    yield started, Process(host=this_process().host, pid=started.pid, began=began)
    started.kill()
    started.wait()


def test_a_rank_whose_process_ended_is_named_at_once(
    pair: tuple[SymmetricBackend, SymmetricBackend], other: tuple[subprocess.Popen[bytes], Process]
) -> None:
    """Also where nobody has waited for it; what it had put before is still taken."""
    team: Any = pair[0]._teams[0, 1]
    team.timeout_s, team.processes = 60, (this_process(), other[1])
    dst = torch.zeros(8)
    gather(pair[1], torch.full((4,), 2.0), torch.zeros(8))
    assert not other[1].has_ended()
    other[0].kill()
    os.waitid(os.P_PID, other[0].pid, os.WEXITED | os.WNOWAIT)
    assert other[1].has_ended()
    gather(pair[0], torch.ones(4), dst).wait()
    assert dst.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    with pytest.raises(BackendError, match="rank 1 is gone"):
        gather(pair[0], torch.ones(4), dst).wait()


def test_a_number_that_was_given_again_is_another_process() -> None:
    own = this_process()
    assert not own.has_ended()
    assert replace(own, began="1").has_ended()
    assert Process(host=own.host, pid=2**22 + 1, began="1").has_ended()


def test_a_member_that_does_not_prepare() -> None:
    backend = SymmetricBackend(rank=0, device=torch.device("cpu"), store=HashStore(), timeout_s=0.2)
    with pytest.raises(BackendError, match=r"cannot connect rank 0 with the team \(0, 1\)"):
        backend.prepare([(0, 1)])


def alone_of_two(timeout_s: float = 5) -> SymmetricBackend:
    cpu, store = torch.device("cpu"), HashStore()
    return SymmetricBackend(rank=0, device=cpu, store=store, timeout_s=timeout_s)


def prepared_with(backend: SymmetricBackend, card: Card, answer: str) -> None:
    """Prepare a team whose other member shows that card, and gives that answer."""
    store = PrefixStore(f"symmetric/{team_key((0, 1))}", backend.store)
    store.set("card/1", json.dumps(card.fields()))
    store.set("opened/1", answer)
    backend.prepare([(0, 1)])


def test_a_member_on_another_host() -> None:
    backend = alone_of_two()
    card = Card(process=replace(this_process(), host="elsewhere"), file=0)
    with pytest.raises(BackendError, match="cannot connect rank 0 with the team") as caught:
        prepared_with(backend, card, "")
    assert "rank 1 is on another host" in str(caught.value)
    assert "tp=symmetric" in str(caught.value)


def test_a_member_whose_memory_cannot_be_opened() -> None:
    backend = alone_of_two()
    card = Card(process=this_process(), file=10**6)
    with pytest.raises(BackendError, match="cannot connect rank 0") as caught:
        prepared_with(backend, card, "")
    assert "No such file" in str(caught.value)


def test_a_member_that_cannot_open_what_this_rank_has() -> None:
    """All members raise; here the other one says why it did."""
    backend = alone_of_two()
    card = Card(process=this_process(), file=os.memfd_create("of a test"))
    os.ftruncate(card.file, 1 << 24)
    with pytest.raises(BackendError, match="cannot connect rank 0") as caught:
        prepared_with(backend, card, "no permission\nto see")
    os.close(card.file)
    assert "on rank 1" in str(caught.value) and "no permission" in str(caught.value)


class Gloo:
    """A backend that is told of teams and calls, and does nothing."""

    name = "gloo"

    def __init__(self) -> None:
        self.teams: list[tuple[int, ...]] = []
        self.calls: list[Call] = []
        self.is_closed = False

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        self.teams += teams

    def bind(self, call: Call) -> Callable[..., Work]:
        self.calls.append(call)
        return lambda srcs, dsts: DONE

    def close(self) -> None:
        self.is_closed = True


def test_a_team_that_does_not_see_itself_is_carried_by_another_backend() -> None:
    """That team alone, whoever could not see whom; it is opened once."""
    opened: list[Gloo] = []
    backend = alone_of_two()
    backend.instead = lambda: opened.append(Gloo()) or opened[-1]
    for rank, host in ((1, "elsewhere"), (2, "elsewhere")):
        store = PrefixStore(f"symmetric/{team_key((0, rank))}", backend.store)
        card = Card(process=replace(this_process(), host=host), file=0)
        store.set(f"card/{rank}", json.dumps(card.fields()))
        store.set(f"opened/{rank}", "")
        backend.prepare([(0, rank)])
        backend.prepare([(0, rank)])
    (gloo,) = opened
    assert gloo.teams == [(0, 1), (0, 2)] == [*backend.carried]
    assert "gloo, as" in backend.carried[0, 1] and "on another host" in backend.carried[0, 1]
    call = Call(kind="Allgather", team=(0, 1), rank=0)
    backend.bind(call)
    backend.posters(1)()(call)
    backend.bind(Call(kind="Allgather", team=(0,), rank=0))([torch.ones(2)], [torch.zeros(2)])
    assert gloo.calls == [call, call]
    backend.close()
    assert gloo.is_closed


def test_a_rank_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(BackendError, match="cannot connect rank 0") as caught:
        alone_of_two().prepare([(0, 1)])
    assert "Too many open files" in str(caught.value)


def test_a_team_of_one_copies() -> None:
    backend = SymmetricBackend(rank=3, device=torch.device("cpu"), store=HashStore(), timeout_s=5)
    call = Call(kind="Allreduce", team=(3,), rank=3, reduce_op="sum")
    dst = torch.zeros(4)
    backend.bind(call)([torch.ones(4)], [dst]).wait()
    assert dst.tolist() == [1, 1, 1, 1]


def test_elsewhere_than_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    because, hint = why_not("symmetric") or ("", "")
    assert "this is darwin" in because and "gloo" in hint
    with pytest.raises(BackendError, match="backend 'symmetric' cannot be used"):
        SymmetricBackend(rank=0, device=torch.device("cpu"), store=HashStore(), timeout_s=5)


def test_nothing_is_left_of_memory_that_nobody_uses() -> None:
    """It has no name, also while it is used."""

    def files() -> int:
        gc.collect()
        return sum("memfd:mdfuse" in os.path.realpath(f) for f in Path("/proc/self/fd").iterdir())

    before, store = files(), HashStore()
    ranks = [
        SymmetricBackend(rank=r, device=torch.device("cpu"), store=store, timeout_s=5)
        for r in (0, 1)
    ]
    joined(*(partial(backend.prepare, [(0, 1)]) for backend in ranks))
    works = [gather(backend, torch.ones(4), torch.zeros(8)) for backend in ranks]
    for work in works:
        work.wait()
    assert files() > before and not any("mdfuse" in name for name in os.listdir("/dev/shm"))
    for backend in ranks:
        backend.close()
    assert files() == before


def test_staging_is_explained_where_posts_name_it() -> None:
    mesh = mf.DeviceMesh.arange(dp=2, tp=2)
    with mf.FusionDefinition("mean") as fd:
        x = fd.define_tensor([4, 6], mesh=mesh, layout={"dp": mf.Shard(0), "tp": mf.Shard(1)})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    told = mf.compile(fd, mf.Options(backend="gloo, dp=symmetric")).explain()
    assert "staging: symmetric takes 4 MiB of cpu" in told and "at most 1" in told
    assert "staging" not in mf.compile(fd, mf.Options(backend="gloo")).explain()


@pytest.mark.parametrize("rows", [8, -1], ids=["a number", "an extent"])
def test_arenas_are_explained(rows: int) -> None:
    mesh = mf.DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("gather") as fd:
        x = fd.define_tensor([rows, 1024], mesh=mesh, layout={"tp": mf.Shard(0)})
        fd.add_output(fd.ops.set(x + 1.0).on(mesh, {}))
    told = mf.compile(fd, mf.Options(backend="symmetric")).explain()
    found = [line.strip() for line in told.splitlines() if "arena" in line]
    is_known = rows > 0
    assert found == ["arena: 16 KiB of a GPU for what the others copy from rank 0"] * is_known


def test_a_wait_tells_the_allocator_of_its_stream() -> None:
    """What was packed on a stream that posts is freed behind the one that waits."""
    done: list[str] = []
    kept: Any = SimpleNamespace(leave=lambda: done.append("leave"))
    half = Half(lambda: done.append("join"), kept)
    work = CudaWork(half, half)
    work.wait()
    work.wait()
    assert done == ["join", "leave", "join"]
    done.clear()
    work = CudaWork(
        Half(lambda: done.append("received"), kept), Half(lambda: done.append("sent"), kept)
    )
    work.sent.wait()
    work.wait()
    assert done == ["sent", "leave", "received", "leave", "sent"]
