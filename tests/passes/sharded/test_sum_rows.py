"""Gradients of weights where a dim of the rows is split, or cut, that is not the first one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

D = torch.float64
POISON = mf.Options(poison=True)


@pytest.mark.parametrize(
    ("shape", "layout", "is_contracted"),
    [
        ((5, 6, 3), {"a": Shard(1)}, True),
        ((2, 5, 4, 3), {"a": Shard(2)}, True),
        ((4, 6, 3), {"a": Shard(0), "b": Shard(1)}, True),
        ((3, 7, 3), {"b": Shard(1)}, True),  # parts of unequal length
        ((4, 6, 3), {"a": Shard(0)}, False),
        ((1, 6, 3), {"a": Shard(1)}, False),  # one sequence: its tokens are all rows
        ((4, 6, 3), {"a": Shard(2)}, False),
    ],
)
def test_no_row_travels(shape: Any, layout: Any, is_contracted: bool) -> None:
    mesh = DeviceMesh.arange(a=2, b=2)
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor(shape, D, mesh, layout)
        w = fd.define_tensor([7, shape[-1]], D, mesh)
        (dw,) = mf.grad(F.linear(x, w).sin().sum(), [w])
        fd.add_output(dw)
    program = mf.compile(fd, POISON)
    assert ("contract(" in str(program)) == is_contracted
    assert is_contracted <= ({c.kind for c in program.communications} == {"Allreduce"})
    given = [torch.randn(shape, dtype=D), torch.randn(7, shape[-1], dtype=D)]
    want = given[1].clone().requires_grad_()
    F.linear(given[0], want).sin().sum().backward()
    for seed in (None, 0):
        (found,) = mf.simulate(program, given, options=POISON, schedule=seed).outputs
        torch.testing.assert_close(found, want.grad, rtol=1e-12, atol=1e-12)


def block(x: Any, w: Any) -> Any:
    """What `nn.MultiheadAttention` and a linear layer do, the batch in the middle."""
    y, _ = F.multi_head_attention_forward(
        x, x, x, 8, 2, w["a.in_proj_weight"], w["a.in_proj_bias"], None, None, False, 0.0,
        w["a.out_proj.weight"], w["a.out_proj.bias"], need_weights=False,
    )  # fmt: skip
    return x + F.linear(F.gelu(y), w["f.weight"], w["f.bias"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_attention_of_heads_in_stages(schedule: str) -> None:
    torch.manual_seed(0)
    modules = [
        nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "f": nn.Linear(8, 8)}) for _ in "ab"
    ]
    meshes = [DeviceMesh([n]) for n in range(2)]
    data = [torch.randn(5, 6, 8, dtype=D) for _ in "xt"]
    given = [{n: p.detach().to(D) for n, p in m.named_parameters()} for m in modules]
    with mf.FusionDefinition("net") as fd:
        h: Any = fd.define_tensor([5, 6, 8], D, meshes[0], name="x")
        t = fd.define_tensor([5, 6, 8], D, meshes[1], name="t")
        wrt: list[Any] = []
        for n, weights in enumerate(given):
            w = {k: fd.define_tensor(v.shape, D, meshes[n]) for k, v in weights.items()}
            h = block(fd.ops.set(h).on(meshes[n], {}) if n else h, w)
            wrt += w.values()
        loss = F.mse_loss(h, t)
        for y in (loss, *mf.grad(loss, wrt)):
            fd.add_output(y)
    batch = {"x": 1, "t": 1}
    program = mf.pipeline(fd, microbatches=3, batch=batch, schedule=schedule, options=POISON)

    leaves = [{n: v.clone().requires_grad_() for n, v in weights.items()} for weights in given]
    y = block(block(data[0], leaves[0]), leaves[1])
    loss = F.mse_loss(y, data[1])
    wanted = [loss.detach(), *torch.autograd.grad(loss, [v for w in leaves for v in w.values()])]
    flat = [*data, *(v for w in given for v in w.values())]
    found = mf.simulate(program, flat, options=POISON, schedule=0).outputs
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("weight", [{"a": Shard(0)}, {"a": Shard(1)}], ids=["columns", "rows"])
def test_rows_that_are_gathered_behind_the_view(weight: Any) -> None:
    """Heads are split, and the next product needs them whole, once more for its gradient."""
    mesh = DeviceMesh.arange(a=2)
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([2, 6, 8], D, mesh, name="x")
        w, v = (fd.define_tensor([8, 8], D, mesh, weight) for _ in "wv")
        y = F.linear(x, w).reshape(2, 6, 2, 4).transpose(1, 2).sin()
        loss = F.linear(y.transpose(1, 2).reshape(2, 6, 8), v).square().mean()
        for out in (loss, *mf.grad(loss, [w, v])):
            fd.add_output(out)
    program = mf.pipeline(fd, microbatches=3, batch={"x": 1}, options=POISON)
    given = [torch.randn(s, dtype=D) for s in ([2, 6, 8], [8, 8], [8, 8])]
    leaves = [u.clone().requires_grad_() for u in given[1:]]
    want = F.linear(F.linear(given[0], leaves[0]).sin(), leaves[1]).square().mean()
    wanted = [want.detach(), *torch.autograd.grad(want, leaves)]
    found = mf.simulate(program, given, options=POISON).outputs
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
