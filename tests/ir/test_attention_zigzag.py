"""Causal attention whose rows are in zigzag order: values, gradients, and the work of each rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Shard


def attend(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def compiled(ranks: int, length: int, heads: int, zigzag: bool, tp: int = 1) -> mf.Program:
    mesh = DeviceMesh.arange(cp=ranks, tp=tp)
    layout = {"cp": Shard(2, zigzag=zigzag), "tp": Shard(1)}
    with mf.FusionDefinition("attended") as fd:
        q, k, v = (
            fd.define_tensor([1, h, length, 4], torch.float64, mesh=mesh, layout=layout)
            for h in (4, heads, heads)
        )
        out = attend(q, k, v)
        fd.add_output(out)
        for g in mf.grad((out * out).sum(), [q, k, v]):
            fd.add_output(g)
    return mf.compile(fd, mf.Options(context="gather"))


@pytest.mark.parametrize(
    ("ranks", "length", "heads", "tp"),
    [(2, 16, 4, 1), (3, 13, 2, 1), (4, 5, 1, 1), (2, 1, 4, 1), (2, 11, 2, 2)],
)
def test_values_and_gradients(ranks: int, length: int, heads: int, tp: int) -> None:
    """Uneven lengths, fewer rows than chunks, one row; shared heads, beside tensor parallelism."""
    generator = torch.Generator().manual_seed(length)
    tensors = [
        torch.randn(1, h, length, 4, dtype=torch.float64, generator=generator)
        for h in (4, heads, heads)
    ]
    whole = [x.clone().requires_grad_() for x in tensors]
    out = attend(*whole)
    grads = torch.autograd.grad((out * out).sum(), whole)
    check_everywhere(compiled(ranks, length, heads, True, tp), tensors, [out.detach(), *grads])


def pairs(program: mf.Program, rank: int, length: int) -> int:
    """The pairs of a row and a key that a rank's printed program computes."""
    text = str(program.for_rank(rank))
    lists = re.findall(r"= attention\(.*rows=\[((?:\[\d+,\d+\],?)+)\]", text)
    assert len(lists) == 1, text
    runs = re.findall(r"\[(\d+),(\d+)\]", lists[0])
    return sum(row + 1 for a, b in runs for row in range(int(a), int(b)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_no_rank_computes_more_than_its_share(ranks: int) -> None:
    length = 32 * ranks
    share = length * (length + 1) / 2 / ranks
    zigzag, plain = (compiled(ranks, length, 4, zigzag) for zigzag in (True, False))
    assert max(pairs(zigzag, r, length) for r in range(ranks)) <= 1.1 * share
    assert max(pairs(plain, r, length) for r in range(ranks)) > 1.4 * share
    received = [max(p.bytes_received(r) for r in range(ranks)) for p in (zigzag, plain)]
    assert received[0] == received[1]
