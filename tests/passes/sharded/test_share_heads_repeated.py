"""Attention that repeats no heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard, hir
from mdfuse.hir.verify.check import verify


def attention(mesh: DeviceMesh, heads: int, shared: int, split: bool) -> FusionDefinition:
    layout = {"t": Shard(1)} if split else {}
    with FusionDefinition("attention") as fd:
        q = fd.define_tensor([2, heads, 5, 4], torch.float32, mesh, layout)
        k, v = (fd.define_tensor([2, shared, 5, 4], torch.float32, mesh, layout) for _ in "kv")
        fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True))
    return fd


@pytest.mark.parametrize(
    ("ranks", "heads", "shared", "split", "is_grouped"),
    [
        (1, 6, 2, False, True),
        (2, 8, 2, True, True),
        (2, 8, 4, True, True),
        (2, 6, 3, True, False),  # a rank's heads of the query do not fall together with a head
        (4, 8, 2, True, False),  # some ranks have no head
        (2, 4, 4, True, False),  # each has its own
    ],
)
def test_heads_that_are_shared(
    ranks: int, heads: int, shared: int, split: bool, is_grouped: bool
) -> None:
    program = mf.compile(attention(DeviceMesh.arange(t=ranks), heads, shared, split))
    verify(program.host)
    assert hir.parse(str(program.host)) == program.host
    text = str(program.host)
    assert ("enable_gqa=True" in text) == is_grouped
    assert ("expand" in text) == (not is_grouped and heads != shared)
    q, k, v = torch.randn(2, heads, 5, 4), *torch.randn(2, 2, shared, 5, 4)
    (got,) = mf.simulate(program, [q, k, v]).outputs
    k, v = (x.double().repeat_interleave(heads // shared, 1) for x in (k, v))
    want = F.scaled_dot_product_attention(q.double(), k, v, is_causal=True)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_what_else_is_repeated_is_left() -> None:
    """Repeated whole, not head by head, as `repeat` does: each head of the query has another."""
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("tiled") as fd:
        q = fd.define_tensor([1, 4, 5, 4], torch.float32, mesh, {})
        k = fd.define_tensor([1, 2, 5, 4], torch.float32, mesh, {})
        many = fd.ops.expand(fd.ops.unsqueeze(k, 1), [1, 2, 2, 5, 4]).reshape(1, 4, 5, 4)
        fd.add_output(fd.ops.scaled_dot_product_attention(q, many, many))
    program = mf.compile(fd)
    assert "enable_gqa" not in str(program.host)
    a, b = torch.randn(1, 4, 5, 4), torch.randn(1, 2, 5, 4)
    (got,) = mf.simulate(program, [a, b]).outputs
    many = b.repeat(1, 2, 1, 1)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(a, many, many))


def test_a_repeated_value_that_is_read_elsewhere_stays() -> None:
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("both") as fd:
        q = fd.define_tensor([1, 4, 5, 4], torch.float32, mesh, {})
        k = fd.define_tensor([1, 2, 5, 4], torch.float32, mesh, {})
        many = fd.ops.repeat_interleave(k, 2, -3)
        fd.add_output(fd.ops.scaled_dot_product_attention(q, many, many))
        fd.add_output(many + 1.0)
    program = mf.compile(fd)
    verify(program.host)
    assert "enable_gqa=True" in str(program.host) and "expand" in str(program.host)
    a, b = torch.randn(1, 4, 5, 4), torch.randn(1, 2, 5, 4)
    first, second = mf.simulate(program, [a, b]).outputs
    many = b.repeat_interleave(2, 1)
    torch.testing.assert_close(first, F.scaled_dot_product_attention(a, many, many))
    torch.testing.assert_close(second, many + 1)
