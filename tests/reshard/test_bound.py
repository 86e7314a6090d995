"""The bound of a reshard, counted by hand."""

from __future__ import annotations

import pytest

from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement
from mdfuse.reshard.bound import bound

FOUR = DeviceMesh.arange(tp=4)


def on(placement: Placement, mesh: DeviceMesh = FOUR) -> Layout:
    return Layout(mesh, {"tp": placement})


@pytest.mark.parametrize(
    ("source", "goal", "worst", "total"),
    [
        (Shard(0), Replicate(), 6, 24),  # each lacks three quarters of 8
        (Replicate(), Shard(0), 0, 0),
        (Shard(0), Shard(1), 1.5, 6),
        (Partial(), Shard(0), 6, 24),  # three more terms of each quarter
        (Partial(), Replicate(), 12, 48),  # three terms at the first, the sum at three more
    ],
)
def test_of_8_elements_on_4_ranks(
    source: Placement, goal: Placement, worst: float, total: float
) -> None:
    shape = (8, 1) if not isinstance(goal, Shard) or goal.dim == 0 else (4, 4)
    size = 8 if shape == (8, 1) else 16
    found = bound(on(source), on(goal), shape)
    scale = size / 8
    if shape == (4, 4):
        worst, total = 3, 12  # of 4 elements each, one is there
        scale = 1
    assert (found.worst, found.total) == (worst * scale, total * scale)


def test_on_another_mesh_all_must_arrive() -> None:
    found = bound(on(Shard(0)), on(Replicate(), DeviceMesh([4, 5], axes=("tp",))), (8,))
    assert (found.worst, found.total) == (8, 16)
