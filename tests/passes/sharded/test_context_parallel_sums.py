"""Attention whose sums have gradients, as with trained sinks, in each form, beside torch in f64."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from helpers.drawn import drawn, numbers
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.ir.attention import attend, attend_grad

AXES = [{"cp": 2}, {"cp": 3}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"cp": 4}]
FORMS = ["gather", "heads", "ring", "auto"]


def of_sink(y: Any, sums: Any, sink: Any) -> Any:
    """What a sink leaves of attention: y e^(l - L), L = log(e^l + e^sink)."""
    return y * (sums - sink).sigmoid().unsqueeze(-1)


#: What is made of a result, the sums, a sink of each head, and a weight.
LOSSES: dict[str, Any] = {
    "sink": lambda y, sums, sink, w: (of_sink(y, sums, sink).square() * w).sum(),
    "sums alone": lambda y, sums, sink, w: (sums.sin() * sink).sum(),
    "some results": lambda y, sums, sink, w: (y * (w > 0)).sum() + (sums * sink).sin().sum(),
}


def defined(axes: dict[str, int], how: dict[str, Any], rows: int, zigzag: bool, loss: str) -> Any:
    """A definition, and whether numbers of documents are its last input."""
    mesh, is_packed = DeviceMesh.arange(**axes), how.get("is_packed")
    how = {a: x for a, x in how.items() if a != "is_packed"}
    split = {"cp": Shard(2, zigzag=zigzag), "tp": Shard(1), "dp": Shard(0)}
    placed = {a: split[a] for a in axes}
    with mf.FusionDefinition("sinks") as fd:
        sizes = [2, 4, rows, 8], [2, 2, rows, 8], [2, 2, rows, 8]
        q, k, v = (fd.define_tensor(n, torch.float64, mesh, placed) for n in sizes)
        sink = fd.define_tensor([4, 1], torch.float64, mesh, {})
        w = fd.define_tensor(sizes[0], torch.float64, mesh, placed)
        mask = []
        if is_packed:
            of = fd.define_tensor([1, rows], torch.int64, mesh, {"cp": Shard(1, zigzag=zigzag)})
            mask = [(of[:, :, None] == of[:, None, :])[:, None]]
        y, sums = mf.ops.attention(q, k, v, *mask, enable_gqa=True, **how)
        for x in (y, *mf.grad(LOSSES[loss](y, sums, sink, w), [q, k, v, sink])):
            fd.add_output(x)
    return fd


def expected(tensors: list[Tensor], seen: Tensor, loss: str) -> list[Tensor]:
    """By the scores of whole tensors; rows see some key."""
    q, k, v, sink = leaves = [x.clone().requires_grad_() for x in tensors[:4]]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1) @ v
    made = LOSSES[loss](y, scores.logsumexp(-1), sink, tensors[4])
    grads = torch.autograd.grad(made, leaves, allow_unused=True)
    pairs = zip(grads, leaves, strict=True)
    return [y.detach(), *(torch.zeros_like(x) if g is None else g for g, x in pairs)]


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("form", FORMS)
def test_no_rank_makes_scores(form: Any, seed: int) -> None:
    draw = random.Random(f"{form} {seed}")
    axes, rows, zigzag = draw.choice(AXES), draw.choice([3, 11, 16, 37]), draw.random() < 0.5
    causal = {"is_causal": True}
    how = draw.choice([{}, causal, {**causal, "window": 3}, {**causal, "is_packed": True}])
    loss = draw.choice([*LOSSES])
    program = mf.compile(defined(axes, how, rows, zigzag, loss), Options(context=form))
    shapes = (2, 4, rows, 8), (2, 2, rows, 8), (2, 2, rows, 8), (4, 1), (2, 4, rows, 8)
    tensors = [numbers(*n, seed=at) for at, n in enumerate(shapes)]
    far = torch.arange(rows).unsqueeze(-1) - torch.arange(rows)
    seen = (far >= 0) & (far < how.get("window", rows)) if how else torch.ones(rows, rows).bool()
    ids = [torch.arange(rows).unsqueeze(0) // 5] if "is_packed" in how else []
    for of in ids:
        seen = seen & (of.mT == of)
    check_everywhere(program, [*tensors, *ids], expected(tensors, seen, loss))
    assert rows < 8 or not re.search(rf",{rows},{rows}\]", str(program))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("features", [0, 4])
def test_numbers_of_rows_in_the_place_of_results(dtype: torch.dtype, features: int) -> None:
    """Also where cotangents are 0, or tiny beside these numbers; other rows keep their digits."""
    q, k, v = (drawn(2, 5, n, seed=n).to(dtype) for n in (3, 3, features))
    out, sums = attend(q, k, v)
    some = torch.tensor([1, 0, 1e-4, 1, 0]).unsqueeze(-1)
    ct = (drawn(2, 5, features, seed=9) * some).to(dtype)
    of_sums = drawn(2, 5, seed=7).to(sums.dtype) * torch.tensor([1, 1, 1, 0, 0])
    weighed = (ct.to(sums.dtype) * out.to(sums.dtype)).sum(-1) - of_sums
    leaves = [x.double().requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    scores = leaves[0] @ leaves[1].mT / 3**0.5
    results = scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)
    wants = torch.autograd.grad(results, leaves, (ct.double(), of_sums.double()))
    grads = attend_grad(q, k, v, weighed, sums, ct)
    assert [x.dtype for x in grads] == [dtype] * 3
    for x, want in zip(grads, wants, strict=True):
        near = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
        torch.testing.assert_close(x.double(), want, rtol=near, atol=near)
