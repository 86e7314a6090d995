"""Communications of leaves: what arrives is what a network of ranks brings, whoever has them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mdfuse import DeviceMesh
from mdfuse.layouts.call import Call
from mdfuse.leaves.carrier import LocalCarrier
from mdfuse.leaves.deal import LEAVES, Deal
from mdfuse.leaves.meeting import LeafMeeting, LeafPost
from mdfuse.simulation.network import SimNetwork

TEAM = tuple(range(LEAVES))


def calls(kind: str, rng: random.Random) -> list[dict[str, Any]]:
    """What each leaf says of a communication of all leaves."""
    counts = [[rng.randrange(4) for _ in TEAM] for _ in TEAM]
    root = rng.randrange(LEAVES)
    every: dict[str, Any] = {
        "AllToAll": [
            {"send_counts": tuple(counts[r]), "recv_counts": tuple(row[r] for row in counts)}
            for r in TEAM
        ],
        "Exchange": [
            {
                "sends": tuple(p for p in TEAM if p != r and counts[r][p]),
                "recvs": tuple(p for p in TEAM if p != r and counts[p][r]),
            }
            for r in TEAM
        ],
        "Broadcast": [{"root": root}] * LEAVES,
        "Reduce": [{"root": root, "reduce_op": "sum"}] * LEAVES,
        "Gather": [{"root": root, "parts": TEAM}] * LEAVES,
        "Scatter": [{"root": root, "parts": TEAM, "blocks": TEAM[::-1]}] * LEAVES,
    }
    return every.get(kind, [{"reduce_op": "max" if kind == "Allreduce" else "sum"}] * LEAVES)


def sizes(call: Call, k: int) -> tuple[list[int], list[int]]:
    """The elements of each source and destination of a leaf."""
    n, at_root = LEAVES, call.rank == call.root
    match call.kind:
        case "AllToAll":
            return [sum(call.send_counts)], [sum(call.recv_counts)]
        case "Exchange":
            return [k] * len(call.sends), [k] * len(call.recvs)
        case "Allgather":
            return [k], [n * k]
        case "ReduceScatter":
            return [n * k], [k]
        case "Broadcast":
            return ([k], []) if at_root else ([], [k])
        case "Reduce" | "Gather":
            return [k], [k * (n if call.kind == "Gather" else 1)] if at_root else []
        case "Scatter":
            return ([n * k] if at_root else []), [k]
    return [k], [k]


REDUCING = ["Allreduce", "ReduceScatter", "Reduce"]
KINDS = [*REDUCING, "Allgather", "Broadcast", "Gather", "Scatter", "AllToAll", "Exchange"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind: str, dtype: torch.dtype) -> None:
    """Small numbers of an integer dtype, whose sums are exact, arrive as in the other simulator."""
    rng = random.Random(f"{kind} {dtype}")
    for ranks in (1, 2, 3, 5, 8):
        deal = Deal(DeviceMesh.arange(dp=ranks))
        k = rng.choice([1, 3, 20000]) if kind == "Allreduce" else rng.randrange(0, 4)
        reduces = kind in REDUCING
        said = [
            x if reduces else {a: b for a, b in x.items() if a != "reduce_op"}
            for x in calls(kind, rng)
        ]
        every = [Call(kind=kind, team=TEAM, rank=leaf, **x) for leaf, x in enumerate(said)]
        ends = [sizes(call, k) for call in every]
        srcs = [[torch.randint(0, 4, (n,)).to(dtype) for n in a] for a, _ in ends]
        expected, network = _empty(ends, dtype), SimNetwork()
        for call, xs, ys in zip(every, srcs, expected, strict=True):
            network.bind(call)(xs, ys)
        found = _empty(ends, dtype)
        posts = {leaf: LeafPost(call, srcs[leaf], found[leaf]) for leaf, call in enumerate(every)}
        meetings = [
            LeafMeeting(rank, {leaf: posts[leaf] for leaf in leaves}, deal)
            for rank in deal.mesh.ranks
            if (leaves := deal.leaves_of(rank))
        ]
        carrier = LocalCarrier()
        carrier.carry([(m.rank, m.rounds()) for m in meetings])
        for a, b in zip(expected, found, strict=True):
            assert all(map(torch.equal, a, b)), (kind, ranks)
        assert (sum(carrier.received.values()) > 0) <= (ranks > 1)


def _empty(ends: list[tuple[list[int], list[int]]], dtype: torch.dtype) -> list[list[Tensor]]:
    return [[torch.zeros(n, dtype=dtype) for n in b] for _, b in ends]


@pytest.mark.parametrize("size", [5, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_sums_have_the_same_bits(size: int, dtype: torch.dtype) -> None:
    """Sums that rounding changes, small and shared out, with the source written in place."""
    terms = [
        (torch.randn(size, generator=torch.Generator().manual_seed(n)) * 10**n).to(dtype)
        for n in TEAM
    ]
    results = []
    for ranks in range(1, 9):
        deal = Deal(DeviceMesh.arange(dp=ranks))
        call = Call(kind="Allreduce", team=TEAM, rank=0, reduce_op="sum")
        buffers = [x.clone() for x in terms]
        posts = {
            leaf: LeafPost(replace(call, rank=leaf), [x], [x]) for leaf, x in enumerate(buffers)
        }
        meetings = [
            LeafMeeting(r, {leaf: posts[leaf] for leaf in deal.leaves_of(r)}, deal)
            for r in deal.team(TEAM)
        ]
        LocalCarrier().carry([(m.rank, m.rounds()) for m in meetings])
        assert all(torch.equal(x, buffers[0]) for x in buffers)
        results.append(buffers[0])
    assert all(torch.equal(x, results[0]) for x in results)
    exact = sum(x.to(torch.complex128) for x in terms)
    torch.testing.assert_close(results[0].to(torch.complex128), exact, rtol=1e-2, atol=1.0)
