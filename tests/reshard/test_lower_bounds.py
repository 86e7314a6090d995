"""The bound of a reshard, counted by hand."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement
from mdfuse.reshard import cost
from mdfuse.reshard.lower_bounds import bound, least_cost

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


PAIRS = FOUR.with_hosts([0, 0, 1, 1])
THERE = DeviceMesh([4, 5], axes=("tp",), hosts=[2, 3])


@pytest.mark.parametrize(
    ("source", "goal", "want"),
    [
        (on(Shard(0), PAIRS), on(Replicate(), PAIRS), 4),  # of 8, the other host's half
        (on(Replicate(), PAIRS), on(Shard(0), PAIRS), 0),
        (on(Shard(0), PAIRS), on(Shard(1), PAIRS), 4),  # the first rank needs the one column
        (on(Partial(), PAIRS), on(Replicate(), PAIRS), 8),  # a host cannot make a sum alone
        (on(Partial(), PAIRS), on(Shard(0), PAIRS), 4),  # of what its ranks need
        (on(Replicate(), PAIRS), on(Replicate(), THERE), 8),
        (on(Replicate(), PAIRS), on(Shard(0), THERE), 4),
        (Layout(PAIRS.alone(0)), on(Shard(0), THERE), 8),  # one host gives out all
        (on(Shard(0), THERE), Layout(PAIRS.alone(3)), 8),
    ],
    ids=str,
)
def test_through_the_network_of_a_host(
    source: Layout, goal: Layout, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    assert import_module("_reshard_hosts").crossing_bound(source, goal, (8, 1)) == want


@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (1, 16), (65, 200), (190, 3)], ids=str)
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 3}, {"dp": 2, "fsdp": 2, "tp": 2}], ids=str)
def test_a_quick_bound_is_never_above_the_cost(
    sizes: dict[str, int], shape: tuple[int, int]
) -> None:
    mesh = DeviceMesh.arange(**sizes)
    every = product((Replicate(), Shard(0), Shard(1), Partial()), repeat=len(sizes))
    layouts = [Layout(mesh, dict(zip(sizes, each, strict=True))) for each in every]
    for source, goal in [*product(layouts, layouts)][::7]:
        assert least_cost(source, goal, shape) <= cost(source, goal, shape), (source, goal)


@pytest.mark.parametrize(
    ("source", "goal"),
    [
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Partial(), Shard(0)),
        (Partial(), Replicate()),
    ],
    ids=str,
)
def test_a_quick_bound_is_the_cost_of_one_collective(source: Placement, goal: Placement) -> None:
    changes = on(source), on(goal), (8, 1)
    assert least_cost(*changes) == cost(*changes)
