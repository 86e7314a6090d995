"""Every kind of communication on real ranks, against what the known inputs of all ranks give."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from helpers.in_turn import in_turn
from torch import Tensor

from mdfuse.backends.c10d.c10d_backend import C10dBackend
from mdfuse.bootstrap import detect, gloo_devices
from mdfuse.errors import BackendError, CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.torch_private import PrefixStore

pytestmark = pytest.mark.world(4)

TEAMS = [(0, 1, 2, 3), (2, 0, 3, 1), (3, 1, 0), (0, 2, 3), (3, 1)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
MOVED_ONLY = [torch.uint16, torch.float8_e4m3fn, torch.complex64]

teams = pytest.mark.parametrize("team", TEAMS, ids=str)
REDUCED = [*FLOATS, *INTEGERS, torch.bool]
MOVED = [*REDUCED, *MOVED_ONLY]


def numbers(rank: int, count: int, dtype: torch.dtype, op: str | None = None) -> Tensor:
    """What `rank` has: small integers whose reductions over up to four ranks are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    low = -2 if dtype.is_signed and op not in ("band", "bor", "bxor") else 0
    values = torch.randint(low, 4, (count,), generator=generator)
    return (values * 12 if op == "avg" else values).to(dtype)


def ops_on(dtype: torch.dtype) -> list[str]:
    if dtype.is_floating_point:
        return ["sum", "prod", "min", "max", "avg"]
    return ["sum", "prod", "min", "max", "band", "bor", "bxor"]


def reduction(op: str, operands: Sequence[Tensor]) -> Tensor:
    """One by one, in double precision or Python-like integers; bool: or, and."""
    dtype = operands[0].dtype
    if dtype is torch.bool:
        op = {"sum": "bor", "prod": "band", "min": "band", "max": "bor"}.get(op, op)
    wide = [x if dtype is torch.bool else x.to(torch.float64) for x in operands]
    if op in ("band", "bor", "bxor"):
        wide = list(operands)
    pairwise: dict[str, Any] = {
        "sum": torch.add,
        "avg": torch.add,
        "prod": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    total = reduce(pairwise[op], wide)
    return (total / len(operands) if op == "avg" else total).to(dtype)


def garbage(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), 1 if dtype is torch.bool else 77).to(dtype)


def post(comm: Any, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> list[Tensor]:
    """Post on this rank's device and wait, twice; the destinations back on the host."""
    comm.prepare([call.team])
    there = [x.to(comm.device) for x in srcs]
    into = [x.to(comm.device) for x in dsts]
    work = comm.poster(call)(there, into)
    work.wait()
    work.wait()
    for x, before in zip(there, srcs, strict=True):
        same(x.cpu(), before, "a source was written to")
    return [x.cpu() for x in into]


def same(got: Tensor, expected: Tensor, what: object = "") -> None:
    assert got.dtype is expected.dtype
    if str(what).startswith("avg"):  # NCCL divides before it adds
        is_same = torch.allclose(got, expected, rtol=4 * torch.finfo(got.dtype).eps, atol=0.02)
    elif got.dtype in FLOATS:
        is_same = torch.equal(got, expected)
    else:  # not every dtype has a comparison
        is_same = torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert is_same, f"{what}: {got} instead of {expected}"


# -- collectives ---------------------------------------------------------------------------------


@teams
@in_turn(dtype=MOVED, count=[0, 1, 5])
def test_allgather(comm: Any, team: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    if comm.rank not in team:
        return
    call = Call(kind="Allgather", team=team, rank=comm.rank)
    src = numbers(comm.rank, count, dtype)
    (got,) = post(comm, call, [src], [garbage(len(team) * count, dtype)])
    same(got, torch.cat([numbers(r, count, dtype) for r in team]))


@teams
@in_turn(dtype=REDUCED, count=[7])
def test_allreduce(comm: Any, team: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    if comm.rank not in team:
        return
    for op in ops_on(dtype):
        call = Call(kind="Allreduce", team=team, rank=comm.rank, reduce_op=op)
        src = numbers(comm.rank, count, dtype, op)
        (got,) = post(comm, call, [src], [garbage(count, dtype)])
        expected = reduction(op, [numbers(r, count, dtype, op) for r in team])
        same(got, expected, op)
        in_place = src.to(comm.device)
        comm.poster(call)([in_place], [in_place]).wait()
        same(in_place.cpu(), expected, f"{op} in place")


@teams
@in_turn(dtype=REDUCED, count=[3])
def test_reduce_scatter(comm: Any, team: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    if comm.rank not in team:
        return
    index, n = team.index(comm.rank), len(team)
    for op in ops_on(dtype):
        call = Call(kind="ReduceScatter", team=team, rank=comm.rank, reduce_op=op)
        src = numbers(comm.rank, n * count, dtype, op)
        (got,) = post(comm, call, [src], [garbage(count, dtype)])
        whole = reduction(op, [numbers(r, n * count, dtype, op) for r in team])
        same(got, whole[count * index : count * index + count], op)


@teams
@in_turn(dtype=REDUCED, count=[7])
def test_reduce(comm: Any, team: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    if comm.rank not in team:
        return
    root = team[-1]
    for op in ops_on(dtype):
        call = Call(kind="Reduce", team=team, rank=comm.rank, root=root, reduce_op=op)
        src = numbers(comm.rank, count, dtype, op)
        dsts = [garbage(count, dtype)] if comm.rank == root else []
        for got in post(comm, call, [src], dsts):
            same(got, reduction(op, [numbers(r, count, dtype, op) for r in team]), op)


@teams
def test_extremes_of_what_is_no_number(comm: Any, team: tuple[int, ...]) -> None:
    """They are none, whichever rank has it, as on one device; NCCL takes numbers for extremes."""
    if comm.rank not in team or comm.backend == "nccl":
        return
    comm.prepare([team])
    index, n = team.index(comm.rank), len(team)
    for dtype, op in product([*FLOATS, torch.float8_e4m3fn], ["max", "min"]):
        rows = torch.arange(-1.0, n * n - 1).reshape(n, n).fill_diagonal_(torch.nan).to(dtype)
        nan = torch.full((n,), torch.nan, dtype=dtype)
        for kind, whole in (("Allreduce", nan), ("ReduceScatter", nan[:1]), ("Reduce", nan)):
            root = team[-1] if kind == "Reduce" else None
            call = Call(kind=kind, team=team, rank=comm.rank, reduce_op=op, root=root)
            dsts = [garbage(len(whole), dtype).to(comm.device)] * (root in (None, comm.rank))
            comm.poster(call)([rows[index].to(comm.device)], dsts).wait()
            for got in dsts:
                assert got.to(torch.float32).isnan().all(), (kind, dtype, op, got)


@teams
def test_reductions_of_complex_numbers(comm: Any, team: tuple[int, ...]) -> None:
    """Both parts of each, also of those that no library knows."""
    if comm.rank not in team:
        return
    index, n = team.index(comm.rank), len(team)
    draw = torch.Generator().manual_seed(n)
    rows = torch.randint(-2, 3, (2, n, n), generator=draw).double()
    rows = torch.complex(rows[0], rows[1])
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        if dtype is torch.complex32 and comm.device.type != "cpu":
            continue  # torch has too little of it there
        for op, whole in (("sum", rows.sum(0)), ("prod", rows.prod(0)), ("avg", rows.mean(0))):
            for kind in ("Allreduce", "ReduceScatter", "Reduce"):
                root = team[-1] if kind == "Reduce" else None
                call = Call(kind=kind, team=team, rank=comm.rank, reduce_op=op, root=root)
                want = whole[index : index + 1] if kind == "ReduceScatter" else whole
                into = [garbage(len(want), dtype)] * (root in (None, comm.rank))
                for got in post(comm, call, [rows[index].to(dtype)], into):
                    at_most = 4e-3 if dtype is torch.complex32 else 1e-6
                    near = torch.allclose(got.to(want.dtype), want, rtol=at_most, atol=at_most)
                    assert near, (kind, dtype, op, got, want)


def test_one_element_of_any_stride(comm: Any) -> None:
    """Dtypes that travel as bytes, too: torch shows those of rows alone, whose stride is 1."""
    if comm.rank > 1:
        return
    comm.prepare([(0, 1)])
    for dtype in MOVED:
        call = Call(kind="Allgather", team=(0, 1), rank=comm.rank)
        src = torch.stack([numbers(comm.rank, 1, dtype), garbage(1, dtype)], 1)[0, ::2]
        got = garbage(2, dtype).to(comm.device)
        comm.poster(call)([src.to(comm.device)], [got]).wait()
        same(got.cpu(), torch.cat([numbers(r, 1, dtype) for r in (0, 1)]), "one element")


@teams
def test_reductions_of_nothing(comm: Any, team: tuple[int, ...]) -> None:
    if comm.rank not in team:
        return
    for dtype in (torch.float32, torch.int16, torch.bool):
        nothing = garbage(0, dtype)
        for kind in ("Allreduce", "ReduceScatter", "Reduce"):
            call = Call(kind=kind, team=team, rank=comm.rank, root=team[0], reduce_op="max")
            is_in = kind != "Reduce" or comm.rank == team[0]
            post(comm, call, [nothing], [nothing] if is_in else [])


@teams
@in_turn(dtype=MOVED, count=[0, 5])
def test_broadcast(comm: Any, team: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    if comm.rank not in team:
        return
    root = team[1]
    call = Call(kind="Broadcast", team=team, rank=comm.rank, root=root)
    if comm.rank == root:
        post(comm, call, [numbers(root, count, dtype)], [])
    else:
        (got,) = post(comm, call, [], [garbage(count, dtype)])
        same(got, numbers(root, count, dtype))


def _counts(sender: int, receiver: int) -> int:
    return (0, 3, 1, 0, 2, 4, 0)[(2 * sender + 3 * receiver) % 7]


def _one_to_one(sender: int, receiver: int) -> int:
    """Rank 1 sends nothing, rank 3 gets nothing."""
    return 0 if sender == 1 or receiver == 3 else 2


@teams
@in_turn(dtype=MOVED, counts=[_counts, _one_to_one])
def test_all_to_all(comm: Any, team: tuple[int, ...], dtype: torch.dtype, counts: Any) -> None:
    if comm.rank not in team:
        return

    def blocks(rank: int) -> list[Tensor]:
        sizes = [counts(rank, to) for to in team]
        return list(numbers(rank, sum(sizes), dtype).split(sizes))

    call = Call(
        kind="AllToAll",
        team=team,
        rank=comm.rank,
        send_counts=tuple(counts(comm.rank, to) for to in team),
        recv_counts=tuple(counts(of, comm.rank) for of in team),
    )
    dst = garbage(sum(call.recv_counts), dtype)
    (got,) = post(comm, call, [torch.cat(blocks(comm.rank))], [dst])
    same(got, torch.cat([blocks(r)[team.index(comm.rank)] for r in team]))


# -- gather, scatter, exchange -------------------------------------------------------------------

#: team, root, parts
GATHERS = [
    ((0, 1, 2, 3), 2, (0, 1, 2, 3)),
    ((2, 0, 3, 1), 3, (2, 0, 3, 1)),
    ((2, 0, 3, 1), 1, (3, 2, 0)),
    ((0, 2, 3), 3, (2, 0)),
    ((3, 1), 3, (1,)),
]


@pytest.mark.parametrize(("team", "root", "parts"), GATHERS, ids=str)
@in_turn(dtype=MOVED, count=[0, 3])
def test_gather(
    comm: Any,
    team: tuple[int, ...],
    root: int,
    parts: tuple[int, ...],
    dtype: torch.dtype,
    count: int,
) -> None:
    if comm.rank not in team:
        return
    call = Call(kind="Gather", team=team, rank=comm.rank, root=root, parts=parts)
    srcs = [numbers(comm.rank, count, dtype)] if comm.rank in parts else []
    dsts = [garbage(count * len(parts), dtype)] if comm.rank == root else []
    for got in post(comm, call, srcs, dsts):
        same(got, torch.cat([numbers(r, count, dtype) for r in parts]))


#: team, root, parts, blocks, source_blocks
SCATTERS = [
    ((0, 1, 2, 3), 2, (0, 1, 2, 3), (0, 1, 2, 3), None),
    ((2, 0, 3, 1), 3, (2, 0, 3, 1), (0, 1, 2, 3), None),
    ((2, 0, 3, 1), 1, (3, 2, 0), (0, 2, 3), None),
    ((0, 1, 2, 3), 0, (1, 2, 3), (0, 1, 2), 4),
    ((0, 2, 3), 3, (0, 2), (1, 1), 3),
    ((3, 1), 3, (1,), (0,), 5),
]


@pytest.mark.parametrize(("team", "root", "parts", "blocks", "source_blocks"), SCATTERS, ids=str)
@in_turn(dtype=MOVED, count=[0, 3])
def test_scatter(
    comm: Any,
    team: tuple[int, ...],
    root: int,
    parts: tuple[int, ...],
    blocks: tuple[int, ...],
    source_blocks: int | None,
    dtype: torch.dtype,
    count: int,
) -> None:
    if comm.rank not in team:
        return
    call = Call(
        kind="Scatter",
        team=team,
        rank=comm.rank,
        root=root,
        parts=parts,
        blocks=blocks,
        source_blocks=source_blocks,
    )
    whole = numbers(root, count * (source_blocks or max(blocks) + 1), dtype)
    dsts = [garbage(count, dtype)] if comm.rank in parts else []
    for got in post(comm, call, [whole] if comm.rank == root else [], dsts):
        block = blocks[parts.index(comm.rank)]
        same(got, whole[block * count : (block + 1) * count])


#: transfers (sender, receiver, elements), in the order in which both ends name them
EXCHANGES = {
    "ring": [(r, (r + 1) % 4, 3) for r in range(4)],
    "pair": [(3, 1, 4)],
    "both ways": [(3, 1, 4), (1, 3, 2)],
    "several pieces": [(0, 2, 5), (0, 2, 1), (2, 0, 3), (0, 2, 0), (0, 2, 7), (1, 0, 2)],
    "uneven": [(s, r, _counts(s, r)) for s in range(4) for r in range(4) if s != r],
    "nothing": [(0, 1, 0), (1, 0, 0)],
}


@pytest.mark.parametrize("kind", ["Exchange", "SendRecv"])
@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("team", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=str)
@in_turn(dtype=MOVED)
def test_exchange(
    comm: Any, kind: str, name: str, team: tuple[int, ...], dtype: torch.dtype
) -> None:
    pieces = [(s, r, numbers(10 * i, n, dtype)) for i, (s, r, n) in enumerate(EXCHANGES[name])]
    sends = [(r, x) for s, r, x in pieces if s == comm.rank]
    recvs = [(s, x) for s, r, x in pieces if r == comm.rank]
    call = Call(
        kind=kind,
        team=team,
        rank=comm.rank,
        sends=tuple(r for r, _ in sends),
        recvs=tuple(s for s, _ in recvs),
    )
    into = [garbage(x.numel(), dtype) for _, x in recvs]
    got = post(comm, call, [x for _, x in sends], into)
    for arrived, (_, expected) in zip(got, recvs, strict=True):
        same(arrived, expected)


# -- buffers and works ---------------------------------------------------------------------------


def test_buffers_are_seen_as_flat_in_memory_order(comm: Any) -> None:
    team = (2, 0, 3, 1)
    comm.prepare([team])
    src = numbers(comm.rank, 6, torch.float32).to(comm.device).view(2, 3).t()
    dst = torch.zeros(3, 4, 2, device=comm.device).permute(1, 0, 2)
    comm.poster(Call(kind="Allgather", team=team, rank=comm.rank))([src], [dst]).wait()
    flat = dst.as_strided((24,), (1,)).cpu()
    same(flat, torch.cat([numbers(r, 6, torch.float32) for r in team]))

    scalar = torch.tensor(float(comm.rank), device=comm.device)
    total = torch.zeros(1, 1, device=comm.device)
    call = Call(kind="Allreduce", team=team, rank=comm.rank, reduce_op="sum")
    comm.poster(call)([scalar], [total]).wait()
    assert total.item() == 6

    out = torch.zeros(3, 2, device=comm.device).t()
    comm.poster(call)([src.t().contiguous()], [out]).wait()
    everything = [numbers(r, 6, torch.float32) for r in team]
    same(out.as_strided((6,), (1,)).cpu(), reduction("sum", everything))


def test_many_posts_in_flight_keep_their_order_and_their_buffers(comm: Any) -> None:
    team = (2, 0, 3, 1)
    comm.prepare([team])
    right, left = (comm.rank + 1) % 4, (comm.rank - 1) % 4
    shift = comm.poster(
        Call(kind="Exchange", team=team, rank=comm.rank, sends=(right,), recvs=(left,))
    )
    total = comm.poster(Call(kind="Allreduce", team=team, rank=comm.rank, reduce_op="bxor"))
    works, arrived, totals = [], [], []
    for i in range(20):
        arrived.append(torch.zeros(1000 + i, device=comm.device))
        totals.append(torch.zeros(100, dtype=torch.int16, device=comm.device))
        message = torch.full((1000 + i,), 100.0 * comm.rank + i, device=comm.device)
        works.append(shift([message], [arrived[-1]]))
        works.append(total([torch.full_like(totals[-1], i << comm.rank)], [totals[-1]]))
        del message
    for work in reversed(works):
        work.wait()
    for i in range(20):
        assert (arrived[i] == 100.0 * left + i).all()
        assert (totals[i] == i ^ i << 1 ^ i << 2 ^ i << 3).all()


def test_teams_are_made_by_their_members_alone(comm: Any) -> None:
    """Ranks that make different numbers of teams, in an order that does not deadlock."""
    mine = [
        team for team in [(1, 0), (0, 1), (2, 3), (1, 2, 3), (3, 2), (0, 3)] if comm.rank in team
    ]
    comm.prepare(mine)
    comm.prepare(mine)
    for team in mine:
        (got,) = post(
            comm,
            Call(kind="Allgather", team=team, rank=comm.rank),
            [torch.tensor([comm.rank])],
            [torch.zeros(len(team), dtype=torch.int64)],
        )
        assert got.tolist() == list(team)


# -- agreement and errors ------------------------------------------------------------------------


def test_all_ranks_learn_what_is_wrong_on_one(comm: Any) -> None:
    for i in range(30):
        text = f"bad input {i}" if comm.rank == i % 4 and i % 3 else None
        expected = tuple(f"bad input {i}" if r == i % 4 and i % 3 else None for r in range(4))
        assert comm.all_ok(text) == expected
    comm.barrier()


def test_init_gives_the_live_communicator(comm: Any) -> None:
    from mdfuse.runtime.communicator import init

    assert init() is comm
    assert comm.size == 4
    assert comm.launch.size == 4


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.int32, "avg"), (torch.float32, "band"), (torch.bool, "avg"), (torch.float32, "mul")],
)
def test_reductions_without_a_meaning_are_refused(comm: Any, dtype: torch.dtype, op: str) -> None:
    comm.prepare([(0, 1, 2, 3)])
    call = Call(kind="Allreduce", team=(0, 1, 2, 3), rank=comm.rank, reduce_op=op)
    x = torch.ones(2, dtype=dtype, device=comm.device)
    with pytest.raises(CommunicationError, match=op):
        comm.poster(call)([x], [x])


def test_binding_needs_a_prepared_team_and_a_known_kind(comm: Any) -> None:
    with pytest.raises(CommunicationError, match="has not prepared"):
        comm.poster(Call(kind="Allgather", team=(comm.rank, comm.size), rank=comm.rank))
    with pytest.raises(CommunicationError, match="Shout is not a kind"):
        comm.poster(Call(kind="Shout", team=(0, 1, 2, 3), rank=comm.rank))


def test_a_member_that_posts_nothing_is_a_timeout_not_a_hang(comm: Any) -> None:
    backend = C10dBackend(
        "gloo",
        rank=comm.rank,
        device=torch.device("cpu"),
        store=PrefixStore("test_timeout", comm.store),
        timeout_s=1.0,
        network=gloo_devices(os.environ, detect(os.environ)),
    )
    team = (0, 1, 2, 3)
    backend.prepare([team])
    if comm.rank != 2:
        x = torch.ones(4)
        call = Call(kind="Allreduce", team=team, rank=comm.rank, reduce_op="sum")
        work = backend.bind(call)([x], [x])
        for _ in range(2):
            with pytest.raises(BackendError, match=f"Allreduce failed on rank {comm.rank}"):
                work.wait()
    comm.barrier()
    backend.close()


def test_a_member_that_does_not_prepare_is_a_timeout_not_a_hang(comm: Any) -> None:
    backend = C10dBackend(
        "gloo",
        rank=comm.rank,
        device=torch.device("cpu"),
        store=PrefixStore("test_prepare", comm.store),
        timeout_s=1.0,
        network=gloo_devices(os.environ, detect(os.environ)),
    )
    if comm.rank != 2:
        with pytest.raises(BackendError, match=f"gloo cannot connect rank {comm.rank}"):
            backend.prepare([(0, 1, 2, 3)])
    comm.barrier()
