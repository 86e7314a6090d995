"""Ops on dims in blocks against one device: which stay, which are local, what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard

TP = DeviceMesh.arange(tp=2)
GQA = (8, 4, 4)

CALLS: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: x.exp() + x,
    "sum over the dim": lambda x: x.sum(1),
    "mean over the dim": lambda x: x.mean(1),
    "max over the dim": lambda x: x.amax(1),
    "sum over another dim": lambda x: x.sum(0),
    "softmax": lambda x: F.softmax(x, 1),
    "log_softmax over another dim": lambda x: F.log_softmax(x, 0),
    "layer norm": lambda x: F.layer_norm(x, (16,)),
    "transpose": lambda x: x.t() * 2,
    "product with itself": lambda x: x @ x.t(),
    "a block": lambda x: x[:, 8:12] * 2,
    "two blocks": lambda x: x[:, 8:].relu(),
    "blocks from the first": lambda x: x[:, :12].relu(),
    "across blocks": lambda x: x[:, 6:10] * 2,
    "every second": lambda x: x[:, 8:12:2] * 2,
    "one column": lambda x: x[:, 9] * 2,
    "reshape": lambda x: x.reshape(4, 2, 8) * 2,
    "reshape of another dim": lambda x: x.reshape(2, 2, 16) * 2,
    "flip": lambda x: x.flip(1),
    "cumsum": lambda x: x.cumsum(1),
    "argmax": lambda x: x.argmax(1).float(),
    "topk": lambda x: torch.topk(x, 3, 1)[0],
    "concatenation": lambda x: torch.cat([x, x], 1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "triangle": lambda x: torch.tril(x),
    "expand": lambda x: x.expand(3, 4, 16).sum(0),
}


@pytest.mark.parametrize("blocks", [GQA, 4, (5, 11)])
@pytest.mark.parametrize("what", CALLS)
def test_values(what: str, blocks: int | tuple[int, ...]) -> None:
    call = CALLS[what]
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with mf.FusionDefinition("one") as fd:
        fd.add_output(call(fd.define_tensor([4, 16], x.dtype, TP, layout={"tp": Shard(1, blocks)})))
    program = mf.compile(fd)
    (found,) = mf.simulate(program, [x]).outputs
    expected = call(x)
    torch.testing.assert_close(found, expected.to(found.dtype))


def posts(program: mf.Program) -> list[str]:
    """The kinds of what a program posts."""
    return [i.comm.kind for i in program.host.walk() if i.comm is not None]


def split(x: Any, *places: int) -> list[Any]:
    """Consecutive parts of the last dim."""
    return list(torch.split(x, places, -1))


@pytest.mark.parametrize("kv", [2, 4])
def test_a_layer_with_fused_projections_reduces_twice(kv: int) -> None:
    heads, width, batch, rows = 4, 16, 2, 3
    sizes, each = (width, kv * 4, kv * 4), 4

    def layer(x: Any, qkv: Any, bias: Any, out: Any, up: Any, down: Any) -> Any:
        q, k, v = split(F.linear(x, qkv, bias), *sizes)
        q, k, v = (
            t.reshape(batch, rows, n, each).transpose(1, 2)
            for t, n in ((q, heads), (k, kv), (v, kv))
        )
        k, v = (t.repeat_interleave(heads // kv, 1) if kv < heads else t for t in (k, v))
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + F.linear(found, out)
        gate, raised = split(F.linear(x, up), 32, 32)
        return x + F.linear(F.silu(gate) * raised, down)

    first = Shard(0, sizes)
    placed = [
        ((batch, rows, width), None),
        ((sum(sizes), width), first),
        ((sum(sizes),), first),
        ((width, width), Shard(1)),
        ((64, width), Shard(0, 2)),
        ((width, 32), Shard(1)),
    ]
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s, _ in placed]
    with mf.FusionDefinition("layer") as fd:
        inputs = [
            fd.define_tensor([*s], torch.float64, TP, layout={"tp": p} if p else {})
            for s, p in placed
        ]
        fd.add_output(layer(*inputs))
    program = mf.compile(fd)
    assert posts(program) == ["Allreduce", "Allreduce"]
    torch.testing.assert_close(mf.simulate(program, tensors).outputs[0], layer(*tensors))


@pytest.mark.parametrize("other", [Shard(0, (4, 2, 2)), Shard(0), None])
def test_a_contraction_over_blocks_is_partial(other: Shard | None) -> None:
    x, w = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    with mf.FusionDefinition("contracted") as fd:
        left = fd.define_tensor([3, 8], x.dtype, TP, layout={"tp": Shard(1, (4, 2, 2))})
        right = fd.define_tensor([8, 5], x.dtype, TP, layout={"tp": other} if other else {})
        fd.add_output((left @ right).on(TP, {"tp": Partial()}))
    program = mf.compile(fd)
    kinds = [] if other == Shard(0, (4, 2, 2)) else ["Exchange"]
    assert posts(program) == kinds
    torch.testing.assert_close(mf.simulate(program, [x, w]).outputs[0], x @ w)


def test_gradients_through_blocks() -> None:
    def loss(x: Any, w: Any) -> Any:
        q, k, v = split(F.linear(x, w), 8, 4, 4)
        return (q.exp().sum(-1) * (k * v).sum(-1)).sum()

    x = torch.randn(3, 6, dtype=torch.float64)
    w = torch.randn(16, 6, dtype=torch.float64, requires_grad=True)
    loss(x, w).backward()
    with mf.FusionDefinition("gradient") as fd:
        a = fd.define_tensor([3, 6], x.dtype, TP)
        b = fd.define_tensor([16, 6], x.dtype, TP, layout={"tp": Shard(0, GQA)})
        (ct,) = mf.grad(loss(a, b), [b])
        fd.add_output(ct)
    program = mf.compile(fd)
    found = mf.simulate(program, [x, w.detach()])
    torch.testing.assert_close(found.outputs[0], w.grad)
    assert found.per_rank[0][0].shape == (8, 6)


def test_views_along_blocks_are_local() -> None:
    """Three projections in one, taken apart by a view, and the gradient: nothing is sent."""

    def loss(x: Any, w: Any) -> Any:
        q, k, v = F.linear(x, w).reshape(3, 3, 4, 2).unbind(1)
        return (q.exp().sum(-1) * (k * v).sum(-1)).sum()

    x = torch.randn(3, 6, dtype=torch.float64)
    w = torch.randn(24, 6, dtype=torch.float64, requires_grad=True)
    loss(x, w).backward()
    with mf.FusionDefinition("gradient") as fd:
        a = fd.define_tensor([3, 6], x.dtype, TP)
        b = fd.define_tensor([24, 6], x.dtype, TP, layout={"tp": Shard(0, 3)})
        (ct,) = mf.grad(loss(a, b), [b])
        fd.add_output(ct)
    program = mf.compile(fd)
    assert posts(program) == []
    torch.testing.assert_close(mf.simulate(program, [x, w.detach()]).outputs[0], w.grad)


def test_a_view_into_other_blocks_is_no_view_of_parts() -> None:
    """Of 24 columns in three blocks, each of two ranks has 4 of every 8; in halves of 12 none."""
    with mf.FusionDefinition("halves") as fd:
        x = fd.define_tensor([2, 24], torch.float64, TP, layout={"tp": Shard(1, 3)})
        fd.add_output(x.reshape(2, 2, 12) * 2)
    program, whole = mf.compile(fd), torch.arange(48.0).double().reshape(2, 24)
    assert posts(program) == ["Exchange"]
    torch.testing.assert_close(
        mf.simulate(program, [whole]).outputs[0], whole.reshape(2, 2, 12) * 2
    )
