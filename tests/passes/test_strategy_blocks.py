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


def layer(kv: int, x: Any, qkv: Any, bias: Any, out: Any, up: Any, down: Any) -> Any:
    """Attention and hidden units, with projections that are one."""
    q, k, v = split(F.linear(x, qkv, bias), 16, kv * 4, kv * 4)
    q, k, v = (t.reshape(2, 3, n, 4).transpose(1, 2) for t, n in ((q, 4), (k, kv), (v, kv)))
    k, v = (t.repeat_interleave(4 // kv, 1) if kv < 4 else t for t in (k, v))
    found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    x = x + F.linear(found, out)
    gate, raised = split(F.linear(x, up), 32, 32)
    return x + F.linear(F.silu(gate) * raised, down)


@pytest.mark.parametrize("kv", [2, 4])
def test_a_layer_with_fused_projections_reduces_twice_each_way(kv: int) -> None:
    """Forwards, and backwards: nothing is sent between the projections and their weights."""
    sizes = (16, kv * 4, kv * 4)
    first = Shard(0, sizes)
    placed = [
        ((2, 3, 16), None),
        ((sum(sizes), 16), first),
        ((sum(sizes),), first),
        ((16, 16), Shard(1)),
        ((64, 16), Shard(0, 2)),
        ((16, 32), Shard(1)),
    ]
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) / 5 for s, _ in placed]
    leaves = [x.clone().requires_grad_() for x in tensors]
    whole = layer(kv, *leaves)
    expected = [whole.detach(), *torch.autograd.grad(whole.square().sum(), leaves)]
    with mf.FusionDefinition("layer") as fd:
        inputs = [
            fd.define_tensor([*s], torch.float64, TP, layout={"tp": p} if p else {})
            for s, p in placed
        ]
        y = layer(kv, *inputs)
        for found in (y, *mf.grad(y.square().sum(), inputs)):
            fd.add_output(found)
    program = mf.compile(fd)
    assert posts(program) == ["Allreduce"] * 4
    for found, right in zip(mf.simulate(program, tensors).outputs, expected, strict=True):
        torch.testing.assert_close(found, right)


def test_what_is_joined_is_in_blocks() -> None:
    """Each rank joins what it has; where all of it is wanted, parts are gathered before."""
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    with mf.FusionDefinition("joined") as fd:
        x, y = (fd.define_tensor(t.shape, t.dtype, TP, {"tp": Shard(1)}) for t in (a, b))
        joined = torch.cat([x, y, x], 1) * 2
        fd.add_output(joined)
        fd.add_output(torch.cat([x, y], 1).on(TP, {}))
    program = mf.compile(fd)
    assert program.fusion.layout(joined.name) == mf.Layout(TP, {"tp": Shard(1, (5, 4, 5))})
    assert posts(program) == ["Allgather"] * 2
    assert [program.bytes_received(rank) // 24 for rank in (0, 1)] == [3 + 2, 3 + 2]
    result = mf.simulate(program, [a, b])
    torch.testing.assert_close(result.outputs[0], torch.cat([a, b, a], 1) * 2)
    torch.testing.assert_close(result.outputs[1], torch.cat([a, b], 1))
    torch.testing.assert_close(
        result.per_rank[1][0], torch.cat([a[:, 3:], b[:, 2:], a[:, 3:]], 1) * 2
    )


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
    """Each of two ranks has 4 of every 8 of 24 columns in three blocks; in halves of 12 none."""
    with mf.FusionDefinition("halves") as fd:
        x = fd.define_tensor([2, 24], torch.float64, TP, layout={"tp": Shard(1, 3)})
        fd.add_output(x.reshape(2, 2, 12) * 2)
    program, whole = mf.compile(fd), torch.arange(48.0).double().reshape(2, 24)
    assert posts(program) == ["Exchange"]
    torch.testing.assert_close(
        mf.simulate(program, [whole]).outputs[0], whole.reshape(2, 2, 12) * 2
    )


def test_a_first_block_of_unequal_ones_is_read_where_it_is() -> None:
    """An exchange that brings nothing is a post."""
    x = torch.randn(3, 24, dtype=torch.float64)
    with mf.FusionDefinition("blocks") as fd:
        given = fd.define_tensor(x.shape, x.dtype, TP, {"tp": Shard(1, (16, 4, 4))})
        for part in given.sin().split([16, 4, 4], 1):
            fd.add_output(part.reshape(3, -1, 4).cos())
    program = mf.compile(fd)
    assert posts(program) == []
    parts = [y.reshape(3, -1, 4).cos() for y in x.sin().split([16, 4, 4], 1)]
    for got, want in zip(mf.simulate(program, [x]).outputs, parts, strict=True):
        torch.testing.assert_close(got, want)
