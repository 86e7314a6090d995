"""The fast lane on GPUs: every kind, again and again, in graphs, and what a hang leaves behind."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_nccl import post
from torch import Tensor

import mdfuse as mf
from mdfuse.backends.base import PostSite
from mdfuse.backends.nccl import lane as nccl_lane
from mdfuse.backends.nccl import nccl_library as nccl_library
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.nccl.lane import NcclLane, open_lane
from mdfuse.layouts.call import Call
from mdfuse.runtime.watch.process import EXIT_STATUS
from mdfuse.runtime.watch.watch import Watch
from mdfuse.torch_private import PrefixStore, TCPStore

ROUNDS = 10
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
KINDS = ["Allgather", "AllToAll", "Broadcast", "Gather", "Scatter", "Exchange"]
REDUCING = ["Allreduce", "ReduceScatter", "Reduce"]

_openings = itertools.count()


def opened(comm: mf.Communicator, timeout_s: float = 60) -> tuple[NcclLane, Watch]:
    """A new lane of all ranks, in another order than theirs."""
    refusal = nccl_library.why_not()
    assert refusal is None, refusal
    store = PrefixStore(f"lane test/{next(_openings)}", comm.store)
    watch = Watch(
        rank=comm.rank,
        timeout_s=timeout_s,
        store=PrefixStore("watch", store),
        is_capturing=torch._C._cuda_isCurrentStreamCapturing,
    )
    watch.start()
    lane = open_lane(
        tuple(reversed(range(comm.size))),
        rank=comm.rank,
        store=PrefixStore("id", store),
        binding=nccl_library.load(),
        device=CudaDevice(comm.device),
        noter=watch,
    )
    return lane, watch


@pytest.fixture(scope="module")
def lane(comm: mf.Communicator) -> Iterator[NcclLane]:
    lane, watch = opened(comm)
    yield lane
    lane.close()
    watch.close()


def numbers(rank: int, count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, (count,), generator=generator).to(dtype)


#: what a rank posts, and what arrives: call, sources, destinations as they should be
Case = tuple[Call, list[Tensor], list[Tensor]]


def case(kind: str, team: tuple[int, ...], rank: int, dtype: torch.dtype, seed: int) -> Case:
    """One rank's part, from the known numbers of all."""
    n, root, k = len(team), team[-1], 1000 + 7 * seed
    at = team.index(rank)
    whole = {r: numbers(r, n * k, dtype, seed) for r in team}
    blocks = {r: whole[r].chunk(n) for r in team}
    joined = torch.cat([blocks[r][0] for r in team])
    call = Call(kind=kind, team=team, rank=rank, root=root, reduce_op="sum", parts=team,
                blocks=tuple(range(n)), send_counts=(k,) * n, recv_counts=(k,) * n,
                sends=(team[(at + 1) % n],) * 2, recvs=(team[at - 1],) * 2)  # fmt: skip
    mine, is_root = whole[rank], rank == root
    before = team[at - 1]

    def total() -> Tensor:
        return torch.stack([whole[r].double() for r in team]).sum(0).to(dtype)

    table: dict[str, Callable[[], tuple[list[Tensor], list[Tensor]]]] = {
        "Allgather": lambda: ([blocks[rank][0]], [joined]),
        "AllToAll": lambda: ([mine], [torch.cat([blocks[r][at] for r in team])]),
        "Broadcast": lambda: ([mine], []) if is_root else ([], [whole[root]]),
        "Gather": lambda: ([blocks[rank][0]], [joined] if is_root else []),
        "Scatter": lambda: ([mine] if is_root else [], [blocks[root][at]]),
        "Exchange": lambda: (list(blocks[rank][:2]), list(blocks[before][:2])),
        "Allreduce": lambda: ([mine], [total()]),
        "ReduceScatter": lambda: ([mine], [total().chunk(n)[at]]),
        "Reduce": lambda: ([mine], [total()] if is_root else []),
    }
    return call, *table[kind]()


def check_kind(lane: NcclLane, comm: mf.Communicator, kind: str, dtype: torch.dtype) -> None:
    """Rounds of several posts in flight, on both streams in turn."""
    stream = torch.cuda.current_stream().cuda_stream
    prepared: dict[bool, Any] = {}
    rounds = []
    call, srcs, expected = case(kind, lane.team, comm.rank, dtype, 0)
    for at_once in (True, False):
        meta = [[x.to("meta") for x in side] for side in (srcs, expected)]
        prepared[at_once] = lane.prepare(
            call, *meta, PostSite(stream=stream, at_once=at_once, where="here")
        )
    for n in range(ROUNDS):
        _, srcs, expected = case(kind, lane.team, comm.rank, dtype, 0)
        factor = n % 2 + 1 if dtype is not torch.bool else 1
        there = [(x * factor).to(x.dtype).to(comm.device) for x in srcs]
        into = [torch.full_like(x, 1, device=comm.device) for x in expected]
        if n % 4 == 3:  # as where nothing was known of the buffers
            work = lane.post(call, there, into, "there")
            if work is not None:
                work.wait()
        else:
            post(prepared[n % 3 == 0], there, into)
        rounds.append((into, there, [(x * factor).to(x.dtype) for x in expected]))
    for into, _, expected in rounds:
        for got, right in zip(into, expected, strict=True):
            assert torch.equal(got.cpu(), right), kind


def finished(lane: NcclLane) -> bool:
    """Whether the marks came behind all posts."""
    torch.cuda.synchronize()
    watch: Any = lane.noter
    return all(p.is_done() for p in watch.ring.posts())


def check_all(lane: NcclLane, comm: mf.Communicator) -> None:
    for kind in KINDS:
        for dtype in DTYPES:
            check_kind(lane, comm, kind, dtype)
    for kind in REDUCING:
        for dtype in DTYPES[:3]:
            check_kind(lane, comm, kind, dtype)
    assert finished(lane)


@pytest.mark.world(2)
@pytest.mark.gpu
def test_every_kind_on_two(lane: NcclLane, comm: mf.Communicator) -> None:
    check_all(lane, comm)


@pytest.mark.world(4)
@pytest.mark.gpu
def test_every_kind_on_four(lane: NcclLane, comm: mf.Communicator) -> None:
    check_all(lane, comm)


# -- graphs ----------------------------------------------------------------------------------------


def captured(
    lane: NcclLane, comm: mf.Communicator, at_once: bool
) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph of: double, all-gather, add one, all-reduce."""
    side = torch.cuda.Stream()
    n, x = comm.size, torch.zeros(512, device=comm.device)
    doubled, joined = torch.empty_like(x), torch.empty(512 * n, device=comm.device)
    total = torch.empty_like(joined)

    def prepared(kind: str, src: Tensor, dst: Tensor) -> Any:
        call = Call(kind=kind, team=lane.team, rank=comm.rank, reduce_op="sum")
        return lane.prepare(
            call,
            [src],
            [dst],
            PostSite(stream=side.cuda_stream, at_once=at_once, where=f"{kind}:1"),
        )

    gather = prepared("Allgather", doubled, joined)
    reduce = prepared("Allreduce", joined, total)

    def program() -> None:
        torch.mul(x, 2, out=doubled)
        post(gather, [doubled], [joined])
        joined.add_(1)
        post(reduce, [joined], [total])

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        program()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        program()
    return graph, x, total


def check_graph(lane: NcclLane, comm: mf.Communicator, at_once: bool) -> None:
    watch: Any = lane.noter
    posted = len(watch.ring.posts())
    watch.captured.clear()
    graph, x, total = captured(lane, comm, at_once)
    assert [what.kind for what in watch.captured] == ["Allgather", "Allreduce"]
    assert len(watch.ring.posts()) == posted + 2
    for n in range(ROUNDS):
        x.fill_(n + comm.rank)
        graph.replay()
        rows = torch.tensor([2.0 * (n + r) + 1 for r in lane.team]) * comm.size
        assert torch.equal(total.cpu(), rows.repeat_interleave(512))
    assert finished(lane)
    graph.reset()


@pytest.mark.world(2)
@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "forked"])
def test_in_a_graph_on_two(lane: NcclLane, comm: mf.Communicator, at_once: bool) -> None:
    check_graph(lane, comm, at_once)


@pytest.mark.world(4)
@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "forked"])
def test_in_a_graph_on_four(lane: NcclLane, comm: mf.Communicator, at_once: bool) -> None:
    check_graph(lane, comm, at_once)


@pytest.mark.world(2)
@pytest.mark.gpu
def test_close_under_a_live_graph(comm: mf.Communicator) -> None:
    own, watch = opened(comm)
    graph, x, total = captured(own, comm, at_once=False)
    graph.replay()
    begun = time.monotonic()
    graph.reset()  # as the communicator does
    own.close()
    assert time.monotonic() - begun < 5
    watch.close()
    assert x.isfinite().all() and total.isfinite().all()


@pytest.mark.world(2)
@pytest.mark.gpu
def test_close_under_a_graph_that_nobody_told(
    comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_lane, "_CLOSE_S", 2.0)
    own, watch = opened(comm)
    graph, _, total = captured(own, comm, at_once=True)
    graph.replay()
    torch.cuda.synchronize()
    begun = time.monotonic()
    own.close()
    assert time.monotonic() - begun < 10
    watch.close()
    graph.reset()
    assert total.isfinite().all()


# -- a hang ----------------------------------------------------------------------------------------

TIMEOUT_S = 5.0

_PROGRAM = """
import sys, time
import torch
from datetime import timedelta
from helpers.fake_nccl import post
from mdfuse.backends.nccl import lane as nccl_lane
from mdfuse.backends.nccl import library as nccl_library
from mdfuse.backends.base import PostSite
from mdfuse.layouts.call import Call
from mdfuse.torch_private import PrefixStore, TCPStore
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.runtime.stores import another_connection
from mdfuse.runtime.watch.watch import Watch

rank, size, port = map(int, sys.argv[1:4])
timeout_s, device = float(sys.argv[4]), torch.device("cuda", int(sys.argv[5]))
torch.cuda.set_device(device)
store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
own = PrefixStore("watch", another_connection(store, 60))
watch = Watch(rank=rank, timeout_s=timeout_s, store=own,
              is_capturing=torch._C._cuda_isCurrentStreamCapturing)
team = tuple(range(size))
watch.start()
lane = nccl_lane.open_lane(team, rank=rank, store=PrefixStore("id", store),
                           binding=nccl_library.load(), device=CudaDevice(device), noter=watch)
x = torch.ones(1 << 20, device=device)
call = Call(kind="Allreduce", team=team, rank=rank, reduce_op="sum")
stream = torch.cuda.current_stream().cuda_stream
place = PostSite(stream=stream, at_once=sys.argv[6] == "at once", where="mlp.py:14")
posting = lane.prepare(call, [x], [x], place)
for _ in range(3):
    post(posting, [x], [x])
torch.cuda.synchronize()
print("hanging", time.time(), flush=True)
if rank == size - 1:
    time.sleep(120)
post(posting, [x], [x])
torch.cuda.synchronize()
"""


def check_hang(comm: mf.Communicator, mode: str) -> None:
    """The last rank does not post: the others' processes end, and say so."""
    where = PrefixStore(f"hang test/{next(_openings)}", comm.store)
    if comm.rank == 0:
        long = timedelta(seconds=60)
        server = TCPStore("127.0.0.1", 0, None, True, long, wait_for_workers=False)
        where.set("port", str(server.port))
    port = where.get("port").decode()
    tests = Path(__file__).parent.parent
    arguments = [str(comm.rank), str(comm.size), port, str(TIMEOUT_S), str(comm.device.index), mode]
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        if comm.rank < comm.size - 1:
            out, err = child.communicate(timeout=90)
            took = time.time() - float(out.split()[1])
            assert child.returncode == EXIT_STATUS, err
            assert took < TIMEOUT_S + 10, took
            last = comm.size - 1
            assert f"Allreduce #4 on team {tuple(range(comm.size))} is not done" in err, err
            assert "mlp.py:14   4 MiB, posted" in err, err
            assert f"rank {last} has not posted it: it is at Allreduce #3 (mlp.py:14)" in err, err
        comm.barrier()
    finally:
        child.kill()
        child.wait()


@pytest.mark.world(2)
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["at once", "forked"])
def test_a_rank_that_does_not_post(comm: mf.Communicator, mode: str) -> None:
    check_hang(comm, mode)


@pytest.mark.world(4)
@pytest.mark.gpu
def test_one_of_four_does_not_post(comm: mf.Communicator) -> None:
    check_hang(comm, "forked")
