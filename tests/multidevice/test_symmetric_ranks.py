"""The backend symmetric on real ranks."""

from __future__ import annotations

import random
import time
from typing import Any

import backend_suite as suite
import pytest
import test_streams_ranks as streams
import torch
from backend_suite import *  # noqa: F403  the tests that every backend passes

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard, Stream
from mdfuse.backends.symmetric import host_team
from mdfuse.backends.symmetric import symmetric_backend as symmetric
from mdfuse.hir.row_norms import RowNorm
from mdfuse.layouts.call import Call
from mdfuse.torch_private import PrefixStore

pytestmark = pytest.mark.backend("symmetric")

shared_gpu = pytest.mark.gpu(1)


@pytest.mark.world(4)
def test_the_backend_is_symmetric(comm: Any) -> None:
    assert comm.backend == "symmetric"


@pytest.mark.world(4)
def test_more_than_fits_into_slots(comm: mf.Communicator) -> None:
    """Pieces of 12 MiB, which go in chunks; along a part of the ranks, too, and unevenly."""
    mesh = DeviceMesh.arange(dp=2, tp=2)
    with mf.FusionDefinition("large") as fd:
        x = fd.define_tensor([1023, 3000], mesh=mesh, layout={"dp": Shard(0), "tp": Shard(1)})
        p = fd.define_tensor([1023, 3000], mesh=mesh, layout={"tp": Partial("sum")})
        fd.add_output(fd.ops.set(x).on(mesh))
        fd.add_output(fd.ops.set(p).on(mesh))
        fd.add_output(fd.ops.set(x).on(mesh, {"dp": Shard(1), "tp": Shard(0)}))
    program, draw = mf.compile(fd), torch.Generator().manual_seed(5)
    whole = torch.randint(-99, 99, (1023, 3000), generator=draw).float()
    parts = torch.randint(-99, 99, (2, 1023, 3000), generator=draw).float()
    dp, tp = divmod(comm.rank, 2)
    mine = [whole.chunk(2)[dp].chunk(2, 1)[tp], parts[tp]]
    got = program.run(*(part.contiguous().to(comm.device) for part in mine))
    want = [whole, parts.sum(0), whole.chunk(2)[tp].chunk(2, 1)[dp]]
    for found, expected in zip(got, want, strict=True):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.world(4)
def test_ranks_that_do_not_see_each_other_communicate_otherwise(
    comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.device.type == "cpu":  # NCCL refuses ranks that share a GPU, so the next test asks more
        check_otherwise([[0, 2], [3, 1]], comm, monkeypatch)


@pytest.mark.world(2)
@pytest.mark.gpu
def test_gpus_that_do_not_see_each_other_communicate_otherwise(
    comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_otherwise([[1, 0]], comm, monkeypatch)


def check_otherwise(
    ranks: list[list[int]], comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 sees nobody in one of the teams; chunks, rings and sums go by it, too."""

    def refuse(rank: int, team: tuple[int, ...], cards: object) -> None:
        if rank == 1:
            raise OSError("this GPU does not reach the others")

    mesh = DeviceMesh(ranks, axes=("dp", "tp"))
    comm.prepare([mesh.team(1, "tp")])  # as other tests may have
    monkeypatch.setattr(symmetric, "_check_host", refuse)
    backend: Any = comm.sharing()["symmetric"]
    apart = PrefixStore("seen by nobody", backend.store)
    for name, new in (("_teams", {}), ("carried", {}), ("store", apart)):
        monkeypatch.setattr(backend, name, new)
    around = Stream(0, 4, rotate="tp")
    with mf.FusionDefinition("otherwise") as fd:
        x = fd.define_tensor([8, 6], mesh=mesh, layout={"dp": Shard(0), "tp": Shard(1)})
        w = fd.define_tensor([6, 4], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output((x @ w).on(mesh, {"dp": Shard(0)}))
        fd.add_output((x @ w).on(mesh, {"dp": Shard(0), "tp": Shard(0)}, stream=around))
    program, draw = mf.compile(fd), torch.Generator().manual_seed(7)
    whole = [torch.randint(-9, 9, n, generator=draw).float() for n in ((8, 6), (6, 4))]
    (dp, tp), n = mesh.coordinate(comm.rank), mesh.shape[0]
    x_part, w_part = whole[0].chunk(n)[dp].chunk(2, 1)[tp], whole[1].chunk(2)[tp]
    rows = (whole[0] @ whole[1]).chunk(n)[dp]
    for _ in range(4):
        got = program.run(*(part.contiguous().to(comm.device) for part in (x_part, w_part)))
        assert torch.equal(got[0].cpu(), rows)
        assert torch.equal(got[1].cpu(), rows.chunk(2)[tp])
    other, team = "nccl" if comm.device.type == "cuda" else "gloo", mesh.team(1, "tp")
    named = ", ".join(map(str, team))
    told = f"symmetric: ranks {named} communicate by {other}, as ranks do not see each other"
    assert (told in program.explain()) == (comm.rank in team)
    for made in backend._teams.values():
        made.close()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of any size are read where they lie."""
    monkeypatch.setattr(host_team, "FEW_CHUNKS", 0)


@pytest.mark.world(4)
@pytest.mark.usefixtures("shown")
def test_what_a_program_computes_is_read_where_it_lies(
    comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gather, a scatter, an all-to-all, an exchange and a ring of 1 MiB each, uneven."""
    shown: list[int] = []
    show = host_team.HostTeam.show
    monkeypatch.setattr(host_team.HostTeam, "show", lambda *args: (shown.append(1), show(*args))[1])
    mesh, around = DeviceMesh.arange(tp=4), mf.Stream(0, 4, rotate="tp")
    with mf.FusionDefinition("shown") as fd:
        x = fd.define_tensor([1023, 1024], mesh=mesh, layout={"tp": Shard(0)})
        p = fd.define_tensor([1024, 1024], mesh=mesh, layout={"tp": Partial("sum")})
        fd.add_output(fd.ops.set(-x).on(mesh))
        fd.add_output(fd.ops.set(x + 1.0).on(mesh, {"tp": Shard(1)}))
        fd.add_output(fd.ops.set(-p).on(mesh, {"tp": Shard(0)}))
        fd.add_output(fd.ops.set(fd.ops.abs(x)).on(mesh, stream=around))
    program, draw = mf.compile(fd), torch.Generator().manual_seed(5)
    whole = torch.randint(-99, 99, (1023, 1024), generator=draw).float()
    parts = torch.randint(-99, 99, (4, 1024, 1024), generator=draw).float()
    mine = [whole.chunk(4)[comm.rank], parts[comm.rank]]
    want = [-whole, (whole + 1).chunk(4, 1)[comm.rank], -parts.sum(0).chunk(4)[comm.rank]]
    for _ in range(3):
        got = program.run(*(part.contiguous().to(comm.device) for part in mine))
        for found, expected in zip(got, [*want, whole.abs()], strict=True):
            assert torch.equal(found.cpu(), expected)
    assert comm.device.type == "cuda" or len(shown) >= 3 * 9


@pytest.mark.world(4)
@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("case", streams.COMMUNICATING, ids=str)
def test_streams(case: streams.Case, comm: mf.Communicator) -> None:
    """Gathers and scatters of contractions in chunks, by each of the forms, uneven."""
    streams.check_case(case, comm, 7, streams.PLAIN)


def pause(cycles: int) -> None:
    time.sleep(cycles / 1e9)


@pytest.mark.world(4)
@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    "name",
    ["gather_matmul_in_a_ring", "matmul_scatter_in_a_ring", "gather_matmul_in_pieces",
     "matmul_scatter_in_pieces", "gather_matmul_in_lengths", "matmul_scatter_in_lengths",
     "matmul_scatter", "matmul_reduce"],
)  # fmt: skip
def test_streams_with_random_delays(name: str, comm: mf.Communicator) -> None:
    """Fifty runs, in which each rank stops anywhere for a while."""
    draw, is_gpu = random.Random(comm.rank), comm.device.type == "cuda"
    delays = streams.Delays(torch.cuda._sleep if is_gpu else pause, draw)
    streams.check_held_up(streams.CASES[name], comm, delays)


# -- on one GPU that all ranks share ---------------------------------------------------------------


@shared_gpu
@pytest.mark.world(2)
@pytest.mark.usefixtures("holding_up")
def test_moves_after_queued_work(comm: Any) -> None:
    assert comm.device.type == "cuda"
    suite.test_what_is_moved_after_queued_work(comm)


@shared_gpu
@pytest.mark.world(2)
@pytest.mark.usefixtures("holding_up")
def test_reductions_after_queued_work(comm: Any) -> None:
    suite.test_what_is_reduced_after_queued_work(comm)


@shared_gpu
@pytest.mark.world(2)
def test_posts_on_streams(comm: Any) -> None:
    suite.test_posts_on_several_streams(comm)


@shared_gpu
@pytest.mark.world(2)
def test_captured_by_two(comm: Any) -> None:
    check_captured(comm)


@shared_gpu
@pytest.mark.world(4)
def test_captured_by_four(comm: Any) -> None:
    check_captured(comm)


@pytest.mark.gpu
@pytest.mark.world(2)
def test_small_sums(comm: Any) -> None:
    """By one kernel: sizes that differ follow each other, by posts and by replays of a graph."""
    team, draw = (0, 1), random.Random(3)
    comm.prepare([team])
    poster = comm.poster(Call(kind="Allreduce", team=team, rank=comm.rank, reduce_op="sum"))
    sizes = [draw.choice([1, 5, 4096, 36_864, 100_003, 847_872]) for _ in range(12)]
    dtypes = [draw.choice([torch.bfloat16, torch.float16, torch.float32]) for _ in sizes]
    given = [
        torch.zeros(n, dtype=x, device=comm.device) for n, x in zip(sizes, dtypes, strict=True)
    ]
    into = [x if n % 5 == 4 else torch.empty_like(x) for n, x in enumerate(given)]

    def run() -> None:
        for src, dst in zip(given, into, strict=True):
            poster([src], [dst]).wait()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for turn in range(40):
        terms = [[drawn(turn, rank, n) for rank in team] for n in sizes]
        for src, term in zip(given, terms, strict=True):
            src.copy_(term[comm.rank])
        graph.replay() if turn % 3 else run()
        for dst, (a, b) in zip(into, terms, strict=True):
            assert torch.equal(dst.cpu().float(), a + b), f"turn {turn}"
    comm.barrier()
    del graph


#: Rows, width, dtype, and whether there is a residual that is returned.
NORMS = (
    (6, 6144, torch.bfloat16, True),
    (1, 100, torch.float16, False),
    (138, 6144, torch.bfloat16, True),
    (3, 16_384, torch.float32, False),
    (60, 16_384, torch.bfloat16, True),
)


@pytest.mark.gpu
@pytest.mark.world(2)
@pytest.mark.parametrize("sums", ["auto", "apart"])
def test_sums_and_norms(comm: Any, sums: Any) -> None:
    """Several in one program, each of what the one before made, in runs and in replays."""
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("norms") as fd:
        for rows, width, dtype, is_added in NORMS:
            x = fd.define_tensor([2, rows, width], dtype, mesh, {"tp": Shard(0)})
            r, w = (fd.define_tensor(n, dtype, mesh) for n in ([rows, width], [width]))
            y = r
            for _ in range(3):
                part = (x * y).sum(0).on(mesh, {"tp": Partial("sum")})
                total = fd.ops.set(part).on(mesh, {})
                r = total + r if is_added else total
                y = fd.ops.rms_norm(r, (width,), w, 1e-5)
            for out in (r, y) if is_added else (y,):
                fd.add_output(out)
    options = mf.Options(backend="symmetric", compile="always", sums=sums)
    program = mf.compile(fd, options)
    assert str(program.host).count("then=row_norm") == (3 * len(NORMS) if sums == "auto" else 0)
    shapes = [(n, dtype) for rows, width, dtype, _ in NORMS
              for n in ((2, rows, width), (rows, width), (width,))]  # fmt: skip
    for turn in range(12):
        draw = torch.Generator().manual_seed(turn)
        whole = [torch.randn(n, generator=draw).to(dtype) for n, dtype in shapes]
        mine = [x[comm.rank : comm.rank + 1] if x.dim() == 3 else x for x in whole]
        got = program.run(*(x.contiguous().to(comm.device) for x in mine))
        for out, right in zip(got, sums_and_norms(whole), strict=True):
            error = (out.double().cpu() - right).norm() / right.norm()
            assert error < (1e-5 if out.dtype == torch.float32 else 3e-2), f"turn {turn}: {error}"
    names = [line for line in str(program.explain()).splitlines() if "in one kernel" in line]
    assert bool(names) == (sums == "auto")
    comm.barrier()


def sums_and_norms(whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results of `test_sums_and_norms` in float64."""
    done = []
    for n, (_, width, _, is_added) in enumerate(NORMS):
        x, r, w = (z.double() for z in whole[3 * n : 3 * n + 3])
        y = r
        for _ in range(3):
            r = (x * y).sum(0) + (r if is_added else 0)
            y = torch.nn.functional.rms_norm(r, (width,), w, 1e-5)
        done += [r, y] if is_added else [y]
    return done


@pytest.mark.gpu
@pytest.mark.world(2)
def test_norms_by_posts_and_replays(comm: Any) -> None:
    """By one kernel: sizes that differ follow each other; results are NaN before each turn."""
    team = (0, 1)
    comm.prepare([team])
    poster = comm.poster(Call(kind="Allreduce", team=team, rank=comm.rank, reduce_op="sum"))
    posts, buffers = [], []
    for rows, width, dtype, is_added in (NORMS[0], NORMS[2], NORMS[4], *NORMS):
        norm = RowNorm(
            width=width, eps=1e-5, dtype=dtype, weight_dtype=dtype, has_residual=is_added,
            has_total=is_added, is_rounded=False,
        )  # fmt: skip
        posts.append(poster.joined(norm, rows))
        x, r, total, y = (torch.zeros(rows, width, dtype=dtype, device=comm.device) for _ in "xrty")
        w = torch.ones(width, dtype=dtype, device=comm.device)
        buffers.append((x, r if is_added else None, w, total if is_added else None, y))
    assert all(posts), "the kernel cannot be compiled, or is refused"

    def run() -> None:
        for post, given in zip(posts, buffers, strict=True):
            post(*given).wait()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for turn in range(40):
        terms = []
        for n, (x, r, _, total, y) in enumerate(buffers):
            terms.append([drawn(turn + 50 * n, rank, x.numel()).view(x.shape) for rank in team])
            x.copy_(terms[-1][comm.rank])
            if r is not None:
                r.copy_(drawn(turn, 7, x.numel()).view(x.shape))
            for out in (total, y):
                if out is not None:
                    out.fill_(torch.nan)
        graph.replay() if turn % 3 else run()
        for (a, b), (x, r, _, total, y) in zip(terms, buffers, strict=True):
            right = (a + b).to(x.dtype).double()
            if total is not None:
                right = right + r.double().cpu()
                assert torch.equal(total.cpu(), right.to(x.dtype)), f"turn {turn}"
            right = torch.nn.functional.rms_norm(right, x.shape[-1:], eps=1e-5)
            error = float((y.double().cpu() - right).norm() / right.norm())
            assert error < 1e-2, f"turn {turn}: {error}"
    comm.barrier()
    del graph


def check_captured(comm: Any, k: int = 1_000_003) -> None:
    """Posts in a CUDA graph, whose waits find new values in each replay; others between replays."""
    n, team = comm.size, tuple(range(comm.size))
    comm.prepare([team])
    counts = (k,) * n
    calls = [
        Call(kind="Allgather", team=team, rank=comm.rank),
        Call(kind="ReduceScatter", team=team, rank=comm.rank, reduce_op="sum"),
        Call(kind="Allreduce", team=team, rank=comm.rank, reduce_op="max"),
        Call(kind="AllToAll", team=team, rank=comm.rank, send_counts=counts, recv_counts=counts),
    ]
    posters = [comm.poster(call) for call in calls]
    source = torch.zeros(n * k, device=comm.device)
    into = [source.new_zeros(size) for size in (n * n * k, k, n * k, n * k)]

    def run() -> None:
        works = [post([source], [dst]) for post, dst in zip(posters, into, strict=True)]
        for work in works:
            work.wait()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for turn in range(6):
        all_of_them = [drawn(turn, rank, n * k) for rank in team]
        source.copy_(all_of_them[comm.rank])
        for dst in into:
            dst.fill_(-1)
        graph.replay() if turn % 3 else run()
        mine = slice(comm.rank * k, comm.rank * k + k)
        stacked = torch.stack(all_of_them)
        expected = [stacked.flatten(), stacked.sum(0)[mine], stacked.amax(0)]
        expected.append(torch.cat([x[mine] for x in all_of_them]))
        for dst, want in zip(into, expected, strict=True):
            assert torch.equal(dst.cpu(), want), f"turn {turn}"
    comm.barrier()
    del graph


def drawn(turn: int, rank: int, count: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(-99, 99, (count,), generator=draw).float()
