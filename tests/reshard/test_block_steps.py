"""Into blocks of a dim, out of them, and between them: the steps, and their bytes."""

from __future__ import annotations

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement
from mdfuse.reshard import cost, steps, with_type


@pytest.mark.parametrize(
    ("before", "after", "kinds", "share"),
    [
        (Shard(0, 3), Replicate(), ["Exchange"], 0.5),
        (Replicate(), Shard(0, 3), ["Exchange"], 0),
        (Shard(0, 3), Shard(0), ["Exchange"], 1 / 6),
        (Shard(0, 3), Shard(1), ["Exchange"], 1 / 4),
        (Partial(), Shard(0, 3), ["ReduceExchange"], 0.5),
        (Shard(0, 3), Shard(0, 3), [], 0),
    ],
)
def test_at_the_bound(before: Placement, after: Placement, kinds: list[str], share: float) -> None:
    mesh, shape = DeviceMesh.arange(tp=2), (12, 8)
    source, goal = Layout(mesh, {"tp": before}), Layout(mesh, {"tp": after})
    assert [step.kind for step in steps(source, goal, shape)] == kinds
    elements = cost(source, goal, shape) / cost(Layout(mesh, {"tp": Shard(0)}), Layout(mesh), (2,))
    assert elements == share * 96


def test_blocks_that_stay_are_no_matter() -> None:
    mesh = DeviceMesh.arange(dp=2, tp=2)
    source = Layout(mesh, {"dp": Partial(), "tp": Shard(0, 3)})
    for goal, text in (
        (Replicate(), "Allreduce[sum] axis=dp"),
        (Shard(1), "ReduceScatter[sum] axis=dp dim=1"),
    ):
        found = steps(source, source.with_placement("dp", goal), (12, 8))
        assert [str(step) for step in found] == [text]


@pytest.mark.parametrize("blocks", [3, (24, 12, 12)])
@pytest.mark.parametrize(("axis", "bytes_"), [("a", 144), ("b", 96)])
def test_ranks_that_hold_the_same_terms_reduce_a_share_each(
    axis: str, bytes_: int, blocks: int | tuple[int, ...]
) -> None:
    """Three more terms of an eighth of 192 bytes, and then the rest of a half or a quarter."""
    mesh = DeviceMesh.arange(a=2, b=4)
    source, goal = Layout(mesh, {"b": Partial()}), Layout(mesh, {axis: Shard(0, blocks)})
    found = [with_type(step, (48, 4), torch.uint8) for step in steps(source, goal, (48, 4))]
    each = [sum(x.bytes_received(rank) for x in found) for rank in mesh.ranks]
    assert each == [bytes_] * 8


@pytest.mark.parametrize(
    "axes", [{"dp": 2, "fsdp": 4, "tp": 2}, {"fsdp": 3, "dp": 4, "tp": 2}], ids=str
)
def test_a_sum_along_an_axis_that_stays_whole_carries_parts_alone(axes: dict[str, int]) -> None:
    """That axis may join hosts: all others split the terms before."""
    mesh = DeviceMesh.arange(**axes)
    split = {"tp": Shard(0, 2)}
    source = Layout(mesh, {"dp": Partial(), "fsdp": Partial(), **split})
    goal = Layout(mesh, {"fsdp": Shard(0, 2), **split}, {0: ("tp", "fsdp")})
    path = steps(source, goal, (96, 4))
    assert [x.kind for x in path] == ["ReduceExchange", "Allreduce"]
    assert [x.source.placement("fsdp") for x in path] == [Partial(), Shard(0, 2)]


def test_a_written_gather_of_blocks_is_refused() -> None:
    text = """
    host @gather on mesh(tp=2) {
      input %x: f32[6] of [12] (tp=S0/3)
      %y: f32[12] (tp=R) = alloc
      %c = post allgather(%x) -> %y f32[12] (tp=S0/3) => (tp=R) axis=tp dim=0
      wait %c
      return %y
    }"""
    with pytest.raises(mf.ProgramError, match="dim 0 is in blocks"):
        mf.hir.verify.check.verify(mf.hir.parse(text))
    narrow = """
    host @cut on mesh(tp=2) {
      input %x: f32[12] (tp=R)
      %y: f32[6] of [12] (tp=S0/3) = narrow(%x)
      return %y
    }"""
    with pytest.raises(mf.ProgramError, match="0:2 4:6 8:10"):
        mf.hir.verify.check.verify(mf.hir.parse(narrow))
