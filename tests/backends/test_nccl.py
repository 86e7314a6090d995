"""The fast lane on fakes: what is posted moves what it should, in which order, and how it ends."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fake_nccl import FakeDevice, FakeNccl, FakeTrack, Wire, post
from torch import Tensor

from mdfuse.backends.base import PostSite
from mdfuse.backends.c10d.c10d_backend import C10dBackend
from mdfuse.backends.nccl import cuda_driver
from mdfuse.backends.nccl import lane as nccl_lane
from mdfuse.backends.nccl import nccl_library as nccl_library
from mdfuse.backends.nccl.cuda_driver import CudaDevice, MarkedTrack
from mdfuse.backends.nccl.lane import NcclLane, open_lane
from mdfuse.backends.post_notes import PostInfo
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import BackendError, CommunicationError, ProgramError
from mdfuse.layouts.call import Call
from mdfuse.runtime.agreement.rendezvous import Meetings
from mdfuse.runtime.fast_lane import Lanes, Replays, agree_on_lanes
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.runtime.watch.positions import is_shared
from mdfuse.runtime.watch.watch import Watch
from mdfuse.torch_private import HashStore, PrefixStore, Store, TCPStore

TEAMS = [(0, 1), (2, 0, 1), (3, 1, 0, 2)]
NATIVE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NATIVE += [torch.int8, torch.uint8, torch.int32, torch.int64]
AS_BYTES = [torch.bool, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn]

teams = pytest.mark.parametrize("team", TEAMS, ids=str)
moved = pytest.mark.parametrize("dtype", [*NATIVE, torch.uint32, torch.uint64, *AS_BYTES], ids=str)
in_both_ways = pytest.mark.parametrize("at_once", [True, False], ids=["at once", "forked"])

COMPUTE = 5


class World:
    """All ranks of a team, in this process."""

    def __init__(self, team: tuple[int, ...]) -> None:
        self.team = team
        self.wire = Wire(len(team))
        self.log: list[Any] = []
        self.watches = {rank: Watch(rank=rank, timeout_s=5) for rank in team}
        self.devices = {rank: FakeDevice(self.log) for rank in team}
        self.bindings = {r: FakeNccl(self.wire, i, self.log) for i, r in enumerate(team)}
        self.lanes = {rank: self.lane(rank) for rank in team}

    def lane(self, rank: int) -> NcclLane:
        return NcclLane(
            team=self.team,
            rank=rank,
            binding=self.bindings[rank],
            comm="comm",
            device=self.devices[rank],
            noter=self.watches[rank],
        )

    def run(
        self,
        call: Callable[[int], Call],
        srcs: dict[int, list[Tensor]],
        dsts: dict[int, list[Tensor]],
        at_once: bool = True,
    ) -> None:
        """Every rank prepares once and posts twice; the second time with other buffers."""
        kept = []
        for rank in self.team:
            given = srcs.get(rank, []), dsts.get(rank, [])
            examples = [[x.to("meta") for x in side] for side in given]
            posting = self.lanes[rank].prepare(
                call(rank), *examples, PostSite(stream=COMPUTE, at_once=at_once, where="mlp.py:14")
            )
            kept.append([[x.clone() for x in side] for side in given])
            post(posting, *kept[-1])
            post(posting, *given)
        self.wire.run()


def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randint(0, 4, (count,), generator=generator).to(dtype)


def blank(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), 1).to(dtype)


def same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype is expected.dtype
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (got, expected)


# -- every kind ------------------------------------------------------------------------------------


@teams
@moved
@in_both_ways
def test_allgather(team: tuple[int, ...], dtype: torch.dtype, at_once: bool) -> None:
    srcs = {r: [numbers(r, 5, dtype)] for r in team}
    dsts = {r: [blank(5 * len(team), dtype)] for r in team}
    World(team).run(lambda r: Call(kind="Allgather", team=team, rank=r), srcs, dsts, at_once)
    for r in team:
        same(dsts[r][0], torch.cat([srcs[q][0] for q in team]))


def total(op: str, rows: list[Tensor]) -> Tensor:
    first, *rest = [row.double() for row in rows]
    for row in rest:
        first = {
            "sum": torch.add,
            "avg": torch.add,
            "prod": torch.mul,
            "min": torch.minimum,
            "max": torch.maximum,
        }[op](first, row)
    return (first / len(rows) if op == "avg" else first).to(rows[0].dtype)


#: Extremes of floats, in which NaN counts, and averages of integers are left to torch.
OF_FLOATS, OF_INTEGERS = ("sum", "prod", "avg"), ("sum", "prod", "min", "max")


@teams
@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, t) for t in NATIVE for op in (OF_FLOATS if t.is_floating_point else OF_INTEGERS)],
    ids=str,
)
def test_reductions(team: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    n, root, k = len(team), team[-1], 3
    srcs = {r: [numbers(r, n * k, dtype)] for r in team}
    expected = total(op, [srcs[r][0] for r in team])
    whole = {r: [blank(n * k, dtype)] for r in team}
    shard = {r: [blank(k, dtype)] for r in team}
    world = World(team)

    def call(kind: str) -> Callable[[int], Call]:
        return lambda r: Call(kind=kind, team=team, rank=r, reduce_op=op, root=root)

    world.run(call("Allreduce"), srcs, whole, at_once=False)
    world.run(call("ReduceScatter"), srcs, shard)
    at_root = {root: [blank(n * k, dtype)]}
    world.run(call("Reduce"), srcs, at_root)
    same(at_root[root][0], expected)
    for i, r in enumerate(team):
        same(whole[r][0], expected)
        same(shard[r][0], expected[i * k : i * k + k])


@teams
@moved
def test_broadcast(team: tuple[int, ...], dtype: torch.dtype) -> None:
    root = team[1]
    srcs = {root: [numbers(9, 6, dtype)]}
    dsts = {r: [blank(6, dtype)] for r in team if r != root}
    World(team).run(lambda r: Call(kind="Broadcast", team=team, rank=r, root=root), srcs, dsts)
    for (dst,) in dsts.values():
        same(dst, srcs[root][0])


@teams
@moved
def test_alltoall_of_any_counts(team: tuple[int, ...], dtype: torch.dtype) -> None:
    def count(sender: int, receiver: int) -> int:
        return (3 * sender + 5 * receiver) % 4

    pieces = {(a, b): numbers(10 * a + b, count(a, b), dtype) for a in team for b in team}
    srcs = {r: [torch.cat([pieces[r, q] for q in team])] for r in team}
    expected = {r: torch.cat([pieces[q, r] for q in team]) for r in team}
    dsts = {r: [blank(expected[r].numel(), dtype)] for r in team}

    def call(r: int) -> Call:
        return Call(
            kind="AllToAll",
            team=team,
            rank=r,
            send_counts=tuple(count(r, q) for q in team),
            recv_counts=tuple(count(q, r) for q in team),
        )

    World(team).run(call, srcs, dsts)
    for r in team:
        same(dsts[r][0], expected[r])


@pytest.mark.parametrize("parts", [(3, 1), (1, 0, 2), (0, 1, 2, 3)], ids=str)
@moved
def test_gather_and_scatter(parts: tuple[int, ...], dtype: torch.dtype) -> None:
    """The root may be one of the parts, or outside; blocks go out in any order."""
    team, root, k = (3, 1, 0, 2), 0, 3
    pieces = {r: [numbers(r, k, dtype)] for r in parts}
    at_root = {root: [blank(k * len(parts), dtype)]}
    world = World(team)
    world.run(
        lambda r: Call(kind="Gather", team=team, rank=r, root=root, parts=parts), pieces, at_root
    )
    same(at_root[root][0], torch.cat([pieces[r][0] for r in parts]))
    blocks = tuple(reversed(range(len(parts))))
    dsts = {r: [blank(k, dtype)] for r in parts}
    source = {root: [torch.cat([at_root[root][0], blank(k, dtype)])]}

    def scatter(r: int) -> Call:
        more = len(parts) + 1
        return Call(
            kind="Scatter", team=team, rank=r, root=root, parts=parts, blocks=blocks,
            source_blocks=more,
        )  # fmt: skip

    world.run(scatter, source, dsts)
    for r, block in zip(parts, blocks, strict=True):
        same(dsts[r][0], source[root][0][block * k : block * k + k])


@pytest.mark.parametrize("kind", ["Exchange", "SendRecv"])
@in_both_ways
def test_exchange(kind: str, at_once: bool) -> None:
    """Several pieces between a pair, of different dtypes; an empty one; a rank without any."""
    team = (2, 0, 1)
    pieces = [
        (2, 0, numbers(1, 4, torch.float32)),
        (2, 0, numbers(2, 3, torch.bool)),
        (0, 2, numbers(3, 0, torch.float32)),
        (0, 2, numbers(4, 5, torch.int16)),
    ]
    world = World(team)
    srcs = {r: [x for a, _, x in pieces if a == r] for r in team}
    dsts = {r: [blank(x.numel(), x.dtype) for _, b, x in pieces if b == r] for r in team}

    def call(r: int) -> Call:
        sends = tuple(b for a, b, _ in pieces if a == r)
        recvs = tuple(a for a, b, _ in pieces if b == r)
        return Call(kind=kind, team=team, rank=r, sends=sends, recvs=recvs)

    world.run(call, srcs, dsts, at_once)
    for r in team:
        for got, expected in zip(dsts[r], [x for _, b, x in pieces if b == r], strict=True):
            same(got, expected)
    assert world.watches[1].ring.posts() == []


# -- order -----------------------------------------------------------------------------------------


def allreduce(rank: int, op: str = "sum") -> Call:
    return Call(kind="Allreduce", team=(0, 1), rank=rank, reduce_op=op)


def test_at_once_is_on_the_stream_itself() -> None:
    world, x = World((0, 1)), torch.zeros(4)
    posting = world.lanes[0].prepare(
        allreduce(0), [x], [x], PostSite(stream=COMPUTE, at_once=True, where="mlp.py:14")
    )
    post(posting, [x], [x])
    assert world.log == [("all_reduce", COMPUTE), ("mark", COMPUTE)]
    assert posting is not None and posting.wait == ()


def test_forked_waits_for_what_is_queued_and_is_waited_for() -> None:
    world, x = World((0, 1)), torch.zeros(4)
    own = FakeDevice.OWN
    posting = world.lanes[0].prepare(
        allreduce(0), [x], [x], PostSite(stream=COMPUTE, at_once=False, where="")
    )
    for _ in range(2):
        world.log.clear()
        post(posting, [x], [x])
        assert world.log == [
            ("record", 1, COMPUTE),
            ("wait", 1, own),
            ("all_reduce", own),
            ("record", 2, own),
            ("mark", own),
            ("wait", 2, 6),
        ]
    assert world.devices[0].events == 2


@pytest.mark.parametrize("kind", ["Allgather", "ReduceScatter"])
def test_a_group_is_one_post(kind: str) -> None:
    """Several dtypes and sizes: one note, one fork, one event to wait for."""
    team, own = (0, 1), FakeDevice.OWN
    world, op = World(team), "sum" if kind == "ReduceScatter" else None
    sizes = [(6, torch.float32), (2, torch.bfloat16), (4, torch.float32)]
    many, few = (4, 2) if kind == "ReduceScatter" else (2, 4)
    srcs = {r: [numbers(r, many * n, dtype) for n, dtype in sizes] for r in team}
    dsts = {r: [blank(few * n, dtype) for n, dtype in sizes] for r in team}
    place = PostSite(stream=COMPUTE, at_once=False, where="mlp.py:14")
    for r in team:
        calls = [Call(kind=kind, team=team, rank=r, reduce_op=op) for _ in sizes]
        sides = [[x.to("meta") for x in side] for side in (srcs[r], dsts[r])]
        world.log.clear()
        post(world.lanes[r].together(calls, *sides, place), srcs[r], dsts[r])
        name = {"Allgather": "all_gather", "ReduceScatter": "reduce_scatter"}[kind]
        assert world.log == [
            ("record", 1, COMPUTE),
            ("wait", 1, own),
            *[(name, own)] * 3,
            ("record", 2, own),
            ("mark", own),
            ("wait", 2, 6),
        ]
    world.wire.run()
    for k in range(len(sizes)):
        if kind == "Allgather":
            whole = torch.cat([srcs[r][k] for r in team])
            assert all(torch.equal(dsts[r][k], whole) for r in team)
        else:
            total = srcs[0][k] + srcs[1][k]
            assert torch.equal(torch.cat([dsts[r][k] for r in team]), total)


def test_a_group_with_a_post_that_nccl_does_not_carry_is_none() -> None:
    world, x = World((0, 1)), torch.zeros(4, dtype=torch.bool)
    place = PostSite(stream=COMPUTE, at_once=False, where="")
    calls = [allreduce(0), allreduce(0)]
    y = torch.zeros(4)
    assert world.lanes[0].together(calls, [x, y], [x, y], place) is None


def test_posts_of_buffers_that_were_not_known() -> None:
    """Forked; prepared once per look of the buffers, which are held until the wait."""
    world = World((0, 1))
    x, y = torch.arange(4.0), torch.arange(4.0) * 10
    for _ in range(2):
        works = []
        for rank, source in ((0, x), (1, y)):
            dst = torch.zeros(4)
            work = world.lanes[rank].post(allreduce(rank), [source.clone()], [dst], "loop.py:3")
            assert work is not None
            works.append((work, dst))
        world.wire.run()
        world.devices[0].current = 9
        for work, dst in works:
            work.wait()
            work.wait()
            assert torch.equal(dst, x + y)
        assert world.log[-1] == ("wait", 2, 6) and ("wait", 2, 9) in world.log
        world.devices[0].current = 6
    assert world.devices[0].events == 2
    longer = torch.zeros(5)
    world.lanes[0].post(allreduce(0), [longer], [longer])
    assert world.devices[0].events == 4
    bits = torch.zeros(4, dtype=torch.int32)
    assert world.lanes[0].post(allreduce(0, "bor"), [bits], [bits]) is None
    assert world.lanes[0].post(allreduce(0), [torch.zeros(0)], [torch.zeros(0)]) is None


def test_a_post_that_nccl_refuses() -> None:
    world, x = World((0, 1)), torch.zeros(4)

    def fail(*_: Any) -> None:
        raise ValueError("unhandled cuda error")

    world.bindings[0].all_reduce = fail  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="Allreduce failed on rank 0"):
        world.lanes[0].post(allreduce(0), [x], [x])
    posting = world.lanes[0].prepare(allreduce(0), [x], [x], PostSite(where=""))
    assert posting is not None and posting.explain is not None
    assert "unhandled" in str(posting.explain(ValueError("unhandled")))
    refused = BackendError("the driver")
    assert posting.explain(refused) is refused


def test_notes() -> None:
    """A note before the post, numbers per team and family, marks per stream."""
    world, x = World((0, 1)), torch.zeros(4)
    lane, watch = world.lanes[0], world.watches[0]
    for at_once in (True, False, True):
        posting = lane.prepare(
            allreduce(0), [x], [x], PostSite(stream=COMPUTE, at_once=at_once, where="mlp.py:14")
        )
        post(posting, [x], [x])
    call = Call(kind="Exchange", team=(0, 1), rank=0, sends=(1,), recvs=())
    post(
        lane.prepare(call, [x], [], PostSite(stream=COMPUTE, at_once=True, where="mlp.py:20")),
        [x],
        [],
    )
    posts = watch.ring.posts()
    assert [p.text() for p in posts] == [
        "Allreduce #1 (mlp.py:14)",
        "Allreduce #2 (mlp.py:14)",
        "Allreduce #3 (mlp.py:14)",
        "Exchange #1 (mlp.py:20)",
    ]
    assert posts[0].subject.bytes == 16 and posts[0].subject.is_shared
    assert not posts[3].subject.is_shared
    assert {s: t.marked for s, t in world.devices[0].tracks.items()} == {COMPUTE: 3, 77: 1}


def test_families_on_one_stream_do_not_hide_each_other() -> None:
    """What a transfer marks says nothing of the collectives before it but that they are done."""
    world = World((0, 1))
    lane, watch, device = world.lanes[0], world.watches[0], world.devices[0]
    gather = Call(kind="Allgather", team=(0, 1), rank=0)
    exchange = Call(kind="Exchange", team=(0, 1), rank=0, sends=(1,), recvs=())
    for at_once in (True, False):
        place = PostSite(stream=COMPUTE, at_once=at_once, where="mlp.py:14")
        gathers = lane.prepare(gather, [x4], [x8], place)
        exchanges = lane.prepare(exchange, [x4], [], place)
        for _ in range(30):
            post(gathers, [x4], [x8])
        for _ in range(3):
            post(exchanges, [x4], [])
    for track in device.tracks.values():
        track.done = track.marked  # all that was queued
    found = {p.family: (p.posted, p.done) for p in watch.position(is_hanging=False).progress}
    assert sorted(found.values()) == [(6, 6), (60, 60)]
    device.tracks[COMPUTE].done -= 4  # the last gather at once, and the exchanges behind it
    late = [p.sequence for p in watch.ring.posts() if not p.is_done()]
    assert late == [30, 1, 2, 3]


def test_what_plans_count_is_not_what_the_lane_counts() -> None:
    """Some collectives of a team go through the lane, others by its process group."""
    world = World((0, 1))
    lane, watch = world.lanes[0], world.watches[0]
    tally = RunCount(name="f", serial=0, runs=5, posted={("Allgather", (0, 1)): 2})
    watch.count(tally, owner=lane)
    call = Call(kind="Allgather", team=(0, 1), rank=0)
    posting = lane.prepare(call, [x4], [x8], PostSite(stream=COMPUTE, at_once=True, where="a.py:1"))
    for _ in range(3):
        post(posting, [x4], [x8])
    at = watch.position(is_hanging=False)
    assert at.of("collectives", (0, 1)).posted == 10
    assert at.of("lane collectives", (0, 1)).posted == 3
    assert is_shared("lane collectives") and not is_shared("lane transfers")


def test_a_post_that_fails_ends_its_group() -> None:
    world, x = World((0, 1)), torch.zeros(4)

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    world.bindings[0].send = fail  # type: ignore[method-assign]
    call = Call(kind="Exchange", team=(0, 1), rank=0, sends=(1,), recvs=())
    posting = world.lanes[0].prepare(call, [x], [], PostSite(stream=0, at_once=True, where=""))
    with pytest.raises(RuntimeError, match="no"):
        post(posting, [x], [])
    world.bindings[0].group_start()


# -- what it does not do ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("band", torch.int32),
        ("bor", torch.int64),
        ("bxor", torch.uint8),
        ("sum", torch.bool),
        ("max", torch.uint32),
        ("max", torch.float32),
        ("min", torch.bfloat16),
        ("sum", torch.float8_e5m2),
        ("sum", torch.complex64),
    ],
    ids=str,
)
def test_left_to_torch(op: str, dtype: torch.dtype) -> None:
    x = torch.zeros(4, dtype=dtype)
    lane = World((0, 1)).lanes[0]
    call = allreduce(0, op)
    assert lane.prepare(call, [x], [x], PostSite(stream=0, at_once=True, where="")) is None


def test_unknown_kinds_are_left_to_torch() -> None:
    lane = World((0, 1)).lanes[0]
    call = Call(kind="Barrier", team=(0, 1), rank=0)
    assert lane.prepare(call, [], [], PostSite(stream=0, at_once=True, where="")) is None


x4, x8 = torch.zeros(4), torch.zeros(8)

WRONG: list[tuple[dict[str, Any], list[Tensor], list[Tensor], str]] = [
    ({"kind": "Allgather"}, [x4], [x4], r"sources of \[4\] elements, destinations of \[8\]"),
    ({"kind": "Allgather"}, [x4, x4], [x8], r"its part is sources of \[4\]"),
    ({"kind": "ReduceScatter", "reduce_op": "sum"}, [x4], [x4], r"sources of \[8\]"),
    ({"kind": "Allreduce", "reduce_op": "sum"}, [x4], [x8], r"destinations of \[4\]"),
    ({"kind": "Allreduce", "reduce_op": "avg"}, [x4.int()], [x4.int()], "avg"),
    ({"kind": "Allreduce", "reduce_op": "sum"}, [x4], [x4.int()], "one dtype"),
    ({"kind": "Broadcast", "root": 0}, [], [x4], r"sources of \[4\]"),
    ({"kind": "Broadcast", "root": 2}, [x4], [], "one of the team"),
    ({"kind": "Reduce", "root": 1, "reduce_op": "sum"}, [x4], [x4], r"destinations of \[\]"),
    ({"kind": "Gather", "root": 0, "parts": (0, 1)}, [x4], [x4], r"destinations of \[8\]"),
    ({"kind": "Gather", "root": 1, "parts": (0, 1)}, [], [], "not what|its part"),
    ({"kind": "Scatter", "root": 1, "parts": (0, 1), "blocks": (0, 1)}, [], [], "not what the"),
    ({"kind": "Scatter", "root": 0, "parts": (1,), "blocks": (2,)}, [x8], [], r"sources of \[6\]"),
    ({"kind": "AllToAll"}, [torch.zeros(5)], [torch.zeros(5)], r"sources of \[4\]"),
    ({"kind": "AllToAll", "send_counts": (4,), "recv_counts": (4,)}, [x4], [x4], "not what"),
    ({"kind": "Exchange", "sends": (1, 1)}, [x4], [], "not what"),
    ({"kind": "Allgather"}, [torch.zeros(4, 4)[:, 0]], [x8], "dense"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda c: f"{c[0]['kind']}: {c[3]}")
def test_refused(case: Any) -> None:
    fields, srcs, dsts, words = case
    lane = World((0, 1)).lanes[0]
    call = Call(team=(0, 1), rank=0, **fields)
    with pytest.raises(CommunicationError, match=words):
        lane.prepare(call, srcs, dsts, PostSite(stream=0, at_once=True, where=""))


def test_dense_in_another_order_is_taken() -> None:
    lane = World((0, 1)).lanes[0]
    x = torch.zeros(2, 3, 4).permute(2, 0, 1)
    assert (
        lane.prepare(allreduce(0), [x], [x], PostSite(stream=0, at_once=True, where="")) is not None
    )


def test_nothing_to_move() -> None:
    world, none = World((0, 1)), torch.zeros(0)
    lane = world.lanes[0]
    posting = lane.prepare(
        allreduce(0), [none], [none], PostSite(stream=0, at_once=False, where="")
    )
    assert posting is None
    call = Call(kind="AllToAll", team=(0, 1), rank=0, send_counts=(0, 0), recv_counts=(0, 0))
    post(
        lane.prepare(call, [none], [none], PostSite(stream=0, at_once=True, where="")),
        [none],
        [none],
    )
    assert world.log == [("mark", 0)]  # noted, so that its number agrees with the others'
    assert len(world.watches[0].ring.posts()) == 1


# -- beginning and end -----------------------------------------------------------------------------


def test_a_second_close_does_nothing() -> None:
    world = World((0, 1))
    lane = world.lanes[0]
    lane.close()
    lane.close()
    assert world.log == ["enter", "synchronize", "destroy"]
    with pytest.raises(BackendError, match="closed its fast lane"):
        lane.prepare(allreduce(0), [x4], [x4], PostSite(stream=0, at_once=True, where=""))


def test_close_never_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_lane, "_CLOSE_S", 0.1)
    monkeypatch.setattr(nccl_lane, "ABORT_S", 0.1)
    world, begun = World((0, 1)), time.monotonic()
    hang = threading.Event()
    world.devices[0].synchronize = lambda: hang.wait(20)  # type: ignore[assignment]
    world.lanes[0].close()
    assert world.log[-1] == "abort"
    # two threads in the destruction of one communicator would free it twice
    world.bindings[1].comm_destroy = lambda comm: hang.wait(20)  # type: ignore[method-assign]
    world.log.clear()
    world.lanes[1].close()
    assert world.log == ["enter", "synchronize"] and time.monotonic() - begun < 5
    hang.set()


@pytest.mark.parametrize("is_held", [False, True])
def test_posts_are_ended_by_an_abort(monkeypatch: pytest.MonkeyPatch, is_held: bool) -> None:
    """It goes on as long as a graph uses the communicator, and `close` destroys nothing twice."""
    monkeypatch.setattr(nccl_lane, "ABORT_S", 0.2)
    world, graph = World((0, 1)), threading.Event()
    lane, binding = world.lanes[0], world.bindings[0]

    def abort(comm: Any) -> None:
        world.log.append(("abort", comm))
        if is_held:
            graph.wait(20)

    binding.comm_abort = abort  # type: ignore[method-assign]
    lane.release()
    lane.release()
    lane.close()
    assert world.log.count(("abort", "comm")) == 1 and "destroy" not in world.log
    assert lane.failure() is None
    graph.set()
    call = Call(kind="Allreduce", team=(0, 1), rank=0, reduce_op="sum")
    x = torch.ones(4)
    with pytest.raises(BackendError, match="has closed its fast lane") as error:
        lane.prepare(call, [x], [x], PostSite(stream=COMPUTE, at_once=True, where="mlp.py:14"))
    assert "mdfuse.rebuild(error)" in str(error.value)


def test_a_backend_ends_the_posts_of_its_lanes_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def abort(self) -> None:
            self.calls.append("abort")

        def shutdown(self) -> None:
            self.calls.append("shutdown")

    groups, on_device = [Group(), Group()], [True, False]
    for group, is_device in zip(groups, on_device, strict=True):
        device, opener = torch.device("cpu"), Opener()
        backend = C10dBackend(
            "gloo", rank=0, device=device, store=HashStore(), timeout_s=5, lanes=opener
        )
        backend._library = replace(backend._library, on_current=is_device)
        monkeypatch.setattr(backend, "_make", lambda _, g=group: SimpleNamespace(group=g))
        backend.prepare([(0, 1)])
        backend.release(all_know=False)
        backend.close()
        assert opener.log[1:] == ["release"] * is_device + [("close", (0, 1)), "close"]
        assert backend.track(7) is None, "a host queues nothing"
    assert [x.calls for x in groups] == [["abort"], ["shutdown"]]


def test_close_goes_on_where_nccl_fails() -> None:
    world = World((0, 1))

    def fail(comm: Any) -> None:
        raise ValueError("unhandled")

    world.bindings[0].comm_destroy = fail  # type: ignore[method-assign]
    world.lanes[0].close()


def test_failure_is_told_until_the_end() -> None:
    world = World((0, 1))
    lane = world.lanes[0]
    assert lane.failure() is None
    world.bindings[0].result = 7  # in progress
    assert lane.failure() is None
    world.bindings[0].result = 6
    assert lane.failure() == "unhandled result 6: the network is down"
    lane.close()
    lane.close()
    assert world.log[-1] == "destroy" and lane.failure() is None


def both(work: Callable[[int], Any]) -> list[Any]:
    """What two ranks get, each in a thread; an error is what it got."""
    got: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            got[rank] = work(rank)
        except Exception as error:
            got[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return got


def test_members_meet_by_the_first_ones_id() -> None:
    log: list[Any] = []
    store, wire = HashStore(), Wire(2)
    watches = [Watch(rank=rank, timeout_s=5) for rank in range(2)]

    def open_one(rank: int) -> NcclLane:
        return open_lane(
            (1, 0),
            rank=rank,
            store=store,
            binding=FakeNccl(wire, 1 - rank, log),
            device=FakeDevice(log),
            noter=watches[rank],
        )

    lanes = both(open_one)
    assert all(isinstance(lane, NcclLane) for lane in lanes)
    inits = sorted(entry for entry in log if entry[0] == "init")
    assert inits == [("init", 2, bytes(range(128)), index) for index in range(2)]
    for watch in watches:
        (noted,) = watch.ring.posts()
        assert noted.is_done()


def test_a_member_that_nccl_refuses() -> None:
    binding = FakeNccl(Wire(2), 0, [])

    def fail(*_: Any) -> None:
        raise ValueError("InternalError (3): no socket\nsecond line")

    binding.comm_init_rank = fail  # type: ignore[assignment]
    watch = Watch(rank=0, timeout_s=5)
    with pytest.raises(BackendError, match="cannot connect rank 0 with the team") as raised:
        open_lane(
            (0, 1), rank=0, store=HashStore(), binding=binding, device=FakeDevice([]), noter=watch
        )
    assert "no socket" in str(raised.value) and "second" not in str(raised.value)


class Opener:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def open(self, team: tuple[int, ...], store: Store) -> Any:
        store.set("mine", "")
        self.log.append(team)
        return SimpleNamespace(
            close=lambda: self.log.append(("close", team)),
            release=lambda: self.log.append("release"),
        )

    def close(self) -> None:
        self.log.append("close")


def test_the_backend_opens_a_lane_per_team() -> None:
    opener, store = Opener(), HashStore()
    backend = C10dBackend(
        "null", rank=0, device=torch.device("cpu"), store=store, timeout_s=5, lanes=opener
    )
    backend.prepare([(0, 1), (2, 0), (0, 1), (1, 2), (0,)])
    assert opener.log == [(0, 1), (2, 0)]
    assert backend.lane((0, 1)) is not None and backend.lane((1, 2)) is None
    backend.close()
    assert opener.log[2:] == [("close", (0, 1)), ("close", (2, 0)), "close"]


# -- who uses it -----------------------------------------------------------------------------------


def agreed(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[str, str], able: tuple[bool, bool]
) -> list[Any]:
    """What two ranks agree on; a rank without nccl4py says so."""
    server = TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False)
    ranks = {}

    def why_not() -> tuple[str, str] | None:
        return None if able[ranks[threading.get_ident()]] else ("no nccl4py", "install it")

    monkeypatch.setattr(nccl_library, "why_not", why_not)
    monkeypatch.setattr(nccl_library, "load", lambda: SimpleNamespace())
    monkeypatch.setattr("mdfuse.runtime.fast_lane.CudaDevice", lambda device: FakeDevice([]))

    def one(rank: int) -> Any:
        ranks[threading.get_ident()] = rank
        store = server.clone()
        return agree_on_lanes(
            settings[rank],
            rank=rank,
            device=torch.device("cpu"),
            watch=Watch(rank=rank, timeout_s=5, store=PrefixStore("watch", store)),
            meetings=Meetings(PrefixStore("agreement", store), rank, 2, 20),
        )

    return both(one)


def test_all_ranks_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (("auto", "auto"), ("always", "auto")):
        lanes = agreed(monkeypatch, settings, (True, True))
        assert all(found is not None and not isinstance(found, Exception) for found in lanes)


def test_one_rank_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, ("auto", "auto"), (True, False)) == [None, None]
    assert agreed(monkeypatch, ("auto", "never"), (True, True)) == [None, None]


@pytest.mark.parametrize("settings", [("always", "auto"), ("auto", "always")])
def test_a_rank_insists(monkeypatch: pytest.MonkeyPatch, settings: tuple[str, str]) -> None:
    for error in agreed(monkeypatch, settings, (True, False)):
        assert isinstance(error, BackendError)
        assert str(error).startswith("rank 1 has no fast lane") and "install it" in str(error)


def test_a_replay_is_one_post() -> None:
    watch, device = Watch(rank=0, timeout_s=5), FakeDevice([])
    lanes = Lanes(rank=0, binding=None, device=device, watch=watch)
    posts = [
        PostInfo(kind=k, team=(0, 1), bytes=8, where=f"mlp.py:{n}")
        for n, k in enumerate("abcdefgh")
    ]
    replays = Replays(watch, lanes.track(COMPUTE), "mlp", (0, 1, 2))
    for region in (0, 1):
        replays.begin()
        watch.captured += posts[:1] if region == 0 else posts
        before, behind = replays.end(region)
        for _ in range(2):
            before()
            behind()
    noted, track = watch.ring.posts()[-1], device.tracks[COMPUTE]
    assert (noted.sequence, noted.turn, track.marked) == (2, 4, 4)
    assert noted.subject.bytes == 64 and noted.subject.where.endswith("f (mlp.py:5) and 2 more")
    assert noted.subject.where.startswith("mlp, region 1: a (mlp.py:0), b (")
    assert noted.subject.family == "replays of mlp, region 1" and noted.subject.is_shared
    track.done = 3
    assert [post.is_done() for post in watch.ring.posts()] == [True, True, True, False]


def test_backends_are_called_around_a_replay() -> None:
    called: list[str] = []
    watch, track = Watch(rank=0, timeout_s=5), FakeTrack(called, COMPUTE)
    pairs = [(partial(called.append, f"before {n}"), partial(called.append, f"behind {n}"))
             for n in (1, 2)]  # fmt: skip
    sharing: Any = [SimpleNamespace(around=lambda x=x: x) for x in (*pairs, None)]
    before, behind = Replays(watch, track, "mlp", (0, 1), sharing).end(0)
    before()
    called.append("replay")
    behind()
    outer = ["before 1", "before 2", "replay", "behind 2", "behind 1"]
    assert [x for x in called if isinstance(x, str)] == outer


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().fast_lane == "auto"
    monkeypatch.setenv("MDFUSE_FAST_LANE", "never")
    assert options_from_environment().fast_lane == "never"
    with pytest.raises(ProgramError, match="fast_lane='sometimes'"):
        Options(fast_lane="sometimes")  # type: ignore[arg-type]


def test_why_not_here() -> None:
    if not torch.cuda.is_available():
        refusal = nccl_library.why_not()
        assert refusal is not None and "no CUDA device" in refusal[0]


# -- the driver ------------------------------------------------------------------------------------


def test_marks_wrap_at_32_bits() -> None:
    memory = ctypes.c_uint32(0)

    def write(stream: Any, address: Any, value: int, flags: int) -> None:
        ctypes.c_uint32.from_address(address.value).value = value

    track = MarkedTrack(write, None, ctypes.addressof(memory))
    assert not track.is_done(1)
    for number in (1, 2, 2**32 - 1, 2**32, 2**32 + 3):
        track.mark(number)
        assert track.is_done(number) and track.is_done(number - 1)
        assert not track.is_done(number + 1)


def test_the_driver_raises() -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    two = ctypes.CFUNCTYPE(integer, pointer, pointer)
    three = ctypes.CFUNCTYPE(integer, pointer, pointer, ctypes.c_uint)
    four = ctypes.CFUNCTYPE(integer, pointer, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    create = ctypes.CFUNCTYPE(integer, pointer, ctypes.c_uint)
    destroyed: list[Any] = []
    library = SimpleNamespace(
        cuEventRecord=two(lambda event, stream: 0 if event else 400),
        cuStreamWaitEvent=three(lambda stream, event, flags: 0),
        cuStreamWriteValue32_v2=four(lambda stream, address, value, flags: 0),
        cuEventCreate=create(lambda event, flags: pointer.from_address(event).__init__(9) or 0),
        cuEventDestroy_v2=destroyed.append,
    )
    device = CudaDevice(torch.device("cpu"), library)
    event = device.event()
    assert event.value == 9
    device.record(event, device.stream(3))
    device.wait(device.stream(3), event, 0)
    with pytest.raises(BackendError, match=r"the CUDA driver refuses .*error 400"):
        device.record(device.stream(0), device.stream(3))
    del event
    assert len(destroyed) == 1


def test_a_thread_that_the_driver_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward on GPU 0 may run in a thread that made no call of CUDA yet."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    current, calls = [0], []

    def tell(context: Any) -> int:
        return pointer.from_buffer(context._obj).__init__(current[0]) or 0

    def set_current(context: Any) -> int:
        current[0] = context.value
        return 0

    library = SimpleNamespace(
        cuCtxGetCurrent=tell,
        cuDevicePrimaryCtxRetain=lambda context, index: context._obj.__init__(70 + index) or 0,
        cuCtxSetCurrent=set_current,
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(cuda_driver, "enter_device", partial(cuda_driver.enter_device, library))

    def create(address: int, flags: int) -> int:
        calls.append(current[0])
        return 0 if current[0] and flags == 2 else 201

    made = ctypes.CFUNCTYPE(integer, pointer, ctypes.c_uint)(create)
    function = cuda_driver.driver_function(made, pointer, ctypes.c_uint)
    assert function(0, 2) == 0
    assert calls == [0, 72]
    with pytest.raises(BackendError, match="error 201"):  # refused for another reason
        function(0, 1)
    assert calls == [0, 72, 72]
