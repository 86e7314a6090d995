"""Attention whose keys are split beside whole tensors in f64: what ranks make is joined."""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard

KINDS = [None, "rows", "keys", "causal", "hidden"]


@pytest.mark.parametrize("seed", range(20))
def test_values_sums_and_gradients(seed: int) -> None:
    """Some parts of the keys are empty, or hidden, and some rows see nothing at all."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    heads, shared = draw.choice([(4, 4), (4, 2), (6, 1)])
    rows, keys = draw.choice([1, 1, 2]), draw.choice([1, 3, 5, 37, 64])
    axes = draw.choice([{"cp": 2}, {"cp": 3}, {"cp": 4}, {"cp": 2, "tp": 2}])
    if "tp" in axes:
        heads, shared = 4, 2
    mesh, kind, tp = DeviceMesh.arange(**axes), KINDS[seed % 5], {}
    tp = {"tp": Shard(1)} if "tp" in axes else {}
    first = draw.choice([0, max(keys - rows, 0), keys // 2])
    how = {"is_causal": True, "q_offset": first} if kind == "causal" else {}
    of_mask = [rows, keys] if kind == "rows" else [2, 1, 1, keys]
    mask = torch.rand(of_mask) > 0.5
    if kind == "hidden":
        mask[0] = False
    masks = [mask] if kind in ("rows", "keys", "hidden") else []
    is_trained = draw.random() < 0.5
    with mf.FusionDefinition("decode") as fd:
        q = fd.define_tensor([2, heads, rows, 8], torch.float64, mesh, tp)
        k, v = (
            fd.define_tensor([2, shared, keys, 8], torch.float64, mesh, {"cp": Shard(2), **tp})
            for _ in "kv"
        )
        given = [fd.define_tensor(of_mask, torch.bool, mesh, {}) for _ in masks]
        y, sums = mf.ops.attention(q, k, v, *given, enable_gqa=True, **how)
        fd.add_output(y)
        fd.add_output(sums)
        for x in mf.grad((y * y).sum(), [q, k, v]) if is_trained else ():
            fd.add_output(x)
    leaves = [
        torch.randn(2, h, n, 8, dtype=torch.float64, requires_grad=True)
        for h, n in ((heads, rows), (shared, keys), (shared, keys))
    ]
    many = [x.repeat_interleave(heads // shared, 1) for x in leaves[1:]]
    scores = leaves[0] @ many[0].mT / 8**0.5
    if kind == "causal":
        mask = torch.arange(rows).unsqueeze(-1) + first >= torch.arange(keys)
    if kind is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    want = scores.logsumexp(-1)
    powers = (scores - want.detach().masked_fill(want == -math.inf, 0).unsqueeze(-1)).exp()
    out = powers / powers.sum(-1, keepdim=True).clamp(min=1e-300) @ many[1]
    grads = torch.autograd.grad((out * out).sum(), leaves) if is_trained else ()
    program = mf.compile(fd)
    inputs = [x.detach() for x in leaves]
    check_everywhere(program, [*inputs, *masks], [x.detach() for x in (out, want, *grads)])
    if keys > 8:
        kinds = [c.reduce_op or c.kind for c in program.communications]
        joined = ["Allgather"] if axes["cp"] == 2 else ["max", "sum"]
        assert kinds == [*joined, *["sum"] * is_trained]
        moved = program.bytes_received(0)
        assert moved < 2 * 8 * 2 * heads * rows * (9 + 1 + 8 * is_trained)


@pytest.mark.parametrize(
    ("law", "kinds"),
    [
        ({}, ["Allgather"]),
        ({"cp": Shard(1)}, ["Allreduce", "ReduceScatter", "ReduceScatter"]),
        ({"tp": Shard(1)}, ["Allreduce", "Allreduce"]),
    ],
)
def test_two_parts_are_gathered(law: dict[str, Shard], kinds: list[str]) -> None:
    """Unless the result is split by it, or each rank has a head of keys for all of the query."""
    mesh = DeviceMesh.arange(cp=2, tp=2)
    heads = {"tp": Shard(1)} if "tp" in law else {}
    torch.manual_seed(0)
    given = [torch.randn(1, h, n, 16, dtype=torch.float64) for h, n in ((4, 1), (2, 99), (2, 99))]
    with mf.FusionDefinition("decode") as fd:
        q = fd.define_tensor([1, 4, 1, 16], torch.float64, mesh, {})
        k, v = (
            fd.define_tensor([1, 2, 99, 16], torch.float64, mesh, {"cp": Shard(2), **heads})
            for _ in "kv"
        )
        y = mf.ops.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        fd.add_output(y.on(mesh, law) if "cp" in law else y)
    want = torch.nn.functional.scaled_dot_product_attention(*given, enable_gqa=True)
    program = mf.compile(fd)
    check_everywhere(program, given, [want])
    assert [c.kind for c in program.communications] == kinds, program


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_joined_in_f32(dtype: torch.dtype) -> None:
    mesh = DeviceMesh.arange(cp=4)
    with mf.FusionDefinition("decode") as fd:
        q = fd.define_tensor([1, 4, 1, 16], dtype, mesh, {})
        k, v = (fd.define_tensor([1, 2, 999, 16], dtype, mesh, {"cp": Shard(2)}) for _ in "kv")
        y = mf.ops.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        fd.add_output(y)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 16).to(dtype) for h, n in ((4, 1), (2, 999), (2, 999)))
    wide = [x.double() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True)
    program = mf.compile(fd)
    (found,) = mf.simulate(program, [q, k, v], options=Options(poison=True)).outputs
    far = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.double(), want, rtol=far, atol=far)
    assert [c.kind for c in program.communications] == ["Allreduce", "Allreduce"]
    gathered = mf.compile(fd, Options(context="gather"))
    assert {c.kind for c in gathered.communications} == {"Allgather"}
    assert program.bytes_received(0) * 20 < gathered.bytes_received(0)
