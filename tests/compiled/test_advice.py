"""What `explain()` says of reshards that move more than a tenth of what a program moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard

MESH = DeviceMesh.arange(tp=4)
TWO, OTHER = DeviceMesh([0, 1]), DeviceMesh([2, 3])
F = torch.nn.functional


def explained(build: Callable[[mf.FusionDefinition], Any]) -> list[str]:
    """The lines of advice: three for each reshard."""
    with mf.FusionDefinition("advice") as fd:
        fd.add_output(build(fd))
    lines = [line.strip() for line in mf.compile(fd).explain().splitlines()]
    found = [at for at, line in enumerate(lines) if line.startswith("moves ")]
    return [line for at in found for line in lines[at : at + 3]]


def test_a_sum_that_is_wanted_whole() -> None:
    """All-reduce of [8,16] in f32: 2 x 3/4 of 512 bytes."""

    def build(fd: mf.FusionDefinition) -> Any:
        x = fd.define_tensor([8, 32], mesh=MESH, layout={"tp": Shard(1)})
        return x @ fd.define_tensor([32, 16], mesh=MESH, layout={"tp": Shard(0)})

    what, because, instead = explained(build)
    assert what.startswith("moves 768 bytes to a rank, 100 % of what arrives: ")
    assert "(tp=P(sum)) -> (tp=R) (test_advice.py:" in what
    assert because == "because the ranks along tp have parts of a sum"
    assert instead.endswith('which moves half: .on(mesh, {"tp": Shard(0)})')


def test_a_dim_that_an_op_needs_whole() -> None:
    def build(fd: mf.FusionDefinition) -> Any:
        features = {"tp": Shard(3)}
        q, k, v = (fd.define_tensor([2, 4, 5, 8], mesh=MESH, layout=features) for _ in range(3))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    lines = explained(build)
    assert len(lines) == 6 and lines[0].startswith("moves 960 bytes to a rank, 50 %")
    assert lines[1].startswith("because scaled_dot_product_attention (test_advice.py:")
    assert lines[1].endswith(" needs dim 3 whole")
    assert lines[2] == 'instead split dim 0 where it is made: .on(mesh, {"tp": Shard(0)})'


def moved(before: Layout, after: Layout) -> Callable[[mf.FusionDefinition], Any]:
    return lambda fd: fd.ops.set(fd.define_tensor([8, 8], mesh=before)).on(after)


@pytest.mark.parametrize(
    ("before", "after", "because", "instead"),
    [
        (Shard(0), Shard(1), "split on dim 0 and read split on dim 1", "Shard(1)"),
        (Shard(0), Replicate(), "asked for whole along tp", "leave it split"),
        (Partial(), Shard(0), "parts of a sum", "nothing"),
    ],
    ids=str,
)
def test_a_set(before: Any, after: Any, because: str, instead: str) -> None:
    lines = explained(moved(Layout(MESH, {"tp": before}), Layout(MESH, {"tp": after})))
    assert because in lines[1] and instead in lines[2]


def test_another_order_of_axes_that_split_one_dim() -> None:
    mesh = DeviceMesh.arange(a=2, b=2)
    split = {"a": Shard(0), "b": Shard(0)}
    before, after = (Layout(mesh, split, {0: order}) for order in (("a", "b"), ("b", "a")))
    lines = explained(moved(before, after))
    assert "in another order" in lines[1] and "one order=" in lines[2]


def test_another_mesh() -> None:
    lines = explained(moved(Layout(TWO, {"x": Shard(0)}), Layout(OTHER, {"x": Shard(0)})))
    assert lines[0].startswith("moves 128 bytes")
    assert str(OTHER) in lines[1] and str(OTHER) in lines[2]


def test_small_ones_are_not_mentioned() -> None:
    def build(fd: mf.FusionDefinition) -> Any:
        x = fd.define_tensor([64, 64], mesh=MESH, layout={"tp": Shard(0)})
        return fd.ops.set(x).on(MESH, {}) * x.sum(0)

    assert len(explained(build)) == 3
    assert explained(lambda fd: fd.define_tensor([8], mesh=MESH) * 2.0) == []
