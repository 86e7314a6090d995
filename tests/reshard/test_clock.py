"""Reshards where hosts are known: values, what goes from host to host, and what time it takes."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.oracle import check_everywhere
from layouts.test_exchange import drawn, layouts

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, hir
from mdfuse.communication import Communication
from mdfuse.layouts.layout import Placement
from mdfuse.reshard import Local, costs, steps
from mdfuse.reshard.steps import time

HOSTS = [0, 0, 0, 0, 1, 1, 1, 1]
MESH = DeviceMesh.arange(a=2, b=4).with_hosts(HOSTS)
OTHER = DeviceMesh([[8, 9, 10, 11], [12, 13, 14, 15]]).with_hosts([2] * 4 + [3] * 4)
BIG = (4096, 4096)


def shown(source: Layout, goal: Layout, shape: tuple[int, ...] = BIG) -> list[str]:
    return [s.kind if isinstance(s, Local) else str(s) for s in steps(source, goal, shape)]


@pytest.mark.parametrize("first", range(0, 90, 15))
def test_drawn_changes(first: int) -> None:
    for seed in range(first, first + 15):
        source, goal, shape = drawn(seed, hosts=True)
        draw = random.Random(seed)
        if draw.random() < 0.5:
            source = draw.choice([*layouts(source.mesh, Partial("max"))])
        x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).float()
        with mf.FusionDefinition("drawn") as fd:
            fd.add_output(fd.ops.set(fd.define_tensor(shape, torch.float32, source)).on(goal))
        program = mf.compile(fd)
        check_everywhere(program, [x], [x])
        assert str(hir.parse(str(program.host))).count(" on ") >= 1


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        # each host reduces its own terms first, and gathers last
        (
            {"a": Partial(), "b": Partial()}, {},
            ["ReduceScatter[sum] axis=b dim=0", "Allreduce[sum] axis=a", "Allgather axis=b dim=0"],
        ),
        # nothing crosses: each host has all terms
        ({"b": Partial()}, {}, ["Allreduce[sum] axis=b"]),
        # each rank of a host takes a quarter of what the host lacks
        ({"a": Partial()}, {}, ["slice", "Allreduce[sum] axis=a", "Allgather axis=b dim=0"]),
        ({"a": Shard(0)}, {"a": Shard(1)}, ["Exchange", "Allgather axis=b dim=0"]),
    ],
)  # fmt: skip
def test_the_network_is_spared(
    before: dict[str, Placement], after: dict[str, Placement], want: list[str]
) -> None:
    assert shown(Layout(MESH, before), Layout(MESH, after)) == want


def test_one_copy_goes_to_each_host() -> None:
    source, goal = Layout(MESH), Layout(OTHER, {"y": Shard(0)})
    assert shown(source, goal) == ["Exchange", "Allgather axis=x dim=0"]
    unknown = [Layout(x.mesh.with_hosts(None), x.by_axis()) for x in (source, goal)]
    assert shown(*unknown) == ["Exchange"]


def test_small_tensors_take_few_messages() -> None:
    """A start takes as long as 270 kB through the network: one message is faster than three."""
    terms = Layout(MESH, {"a": Partial(), "b": Partial()})
    assert shown(terms, Layout(MESH), (8, 8)) == ["Allreduce[sum] axes=a,b"]


def test_the_size_of_an_element_counts() -> None:
    terms = Layout(MESH, {"a": Partial(), "b": Partial()})
    found = [len(steps(terms, Layout(MESH), (512, 512), itemsize)) for itemsize in (1, 8)]
    assert found == [1, 3]


@pytest.mark.parametrize("seed", range(25))
def test_no_detour_is_faster(seed: int) -> None:
    """What the planner finds is no slower than a way over any layout in between."""
    draw = random.Random(seed)
    every = [*layouts(MESH, Partial())]
    source, goal = draw.choice(every), draw.choice([*layouts(MESH)])
    best = time(source, goal, BIG, 4)
    for middle in every:
        if {*middle.partial_axes} <= {*source.partial_axes}:
            assert best <= time(source, middle, BIG, 4) + time(middle, goal, BIG, 4), middle


def test_what_is_not_known_costs_bytes() -> None:
    """Programs do not depend on hosts that one of two meshes does not know."""
    bare = MESH.with_hosts(None)
    for before, after in (({"a": Partial()}, {}), ({"a": Shard(0)}, {"b": Shard(0)})):
        want = shown(Layout(bare, before), Layout(bare, after))
        assert shown(Layout(bare, before), Layout(MESH, after))[: len(want)] == want


def test_of_two_ways_as_long_the_one_of_fewer_steps_is_taken() -> None:
    """The longer one is found first."""
    there = DeviceMesh([[4, 5, 6, 7], [8, 9, 10, 11]], ("a", "b"))
    there = there.with_hosts([1, 1, 1, 1, 2, 2, 2, 2])
    goal = Layout(there, {"a": Shard(1), "b": Shard(1)}, {1: ("b", "a")})
    assert shown(Layout(MESH, {"a": Partial()}), goal, (64, 48)) == ["ReduceExchange[sum]"]


@pytest.mark.parametrize("kind", ["Broadcast", "Scatter", "Gather", "SendRecv"])
def test_what_goes_from_mesh_to_mesh(kind: str) -> None:
    """Through the network of the busiest host, of 16 elements."""
    from mdfuse.reshard.clock import crossing_of, messages_of

    one, pair = DeviceMesh([0], hosts=[0]), DeviceMesh([1, 2], axes="p", hosts=[0, 0])
    four = DeviceMesh([4, 5, 6, 3], axes="p", hosts=[1, 1, 2, 0])
    split: dict[str, Placement] = {"p": Shard(0)}
    ways = {
        "Broadcast": (Layout(one), Layout(four), 16),
        "Scatter": (Layout(one), Layout(four, split), 12),
        "Gather": (Layout(four, split), Layout(one), 12),
        "SendRecv": (Layout(pair, split), Layout(DeviceMesh([4, 6], "p", [1, 2]), split), 16),
    }
    source, goal, want = ways[kind]
    (step,) = steps(source, goal, (16,))
    assert isinstance(step, Communication)
    assert (step.kind, messages_of(step, (16,)), crossing_of(step, (16,))) == (kind, 1, want)


def test_replicas_elsewhere() -> None:
    assert shown(Layout(MESH, {"a": Replicate()}), Layout(OTHER)) == ["Broadcast"]


@pytest.mark.parametrize("after", [{}, {"a": Shard(0)}, {"b": Shard(2)}, {"a": Shard(1)}], ids=str)
@pytest.mark.parametrize("before", [{}, {"a": Shard(0)}, {"b": Shard(0)}, {"a": Shard(1)}], ids=str)
def test_from_hosts_to_other_hosts(
    before: dict[str, Placement], after: dict[str, Placement]
) -> None:
    """On 2 x 4 and 3 x 4 ranks, whose rows are hosts."""
    one = DeviceMesh.arange(a=2, b=4).with_hosts(HOSTS)
    other = DeviceMesh.of((3, 4), range(8, 20), ("a", "b"), [2] * 4 + [3] * 4 + [4] * 4)
    x = torch.arange(24 * 8 * 6.0).reshape(24, 8, 6)
    with mf.FusionDefinition("across") as fd:
        y = fd.define_tensor([24, 8, 6], mesh=one, layout=before)
        fd.add_output(fd.ops.set(y).on(other, after))
    check_everywhere(mf.compile(fd), [x], [x])


def test_a_copy_on_the_same_host_is_read() -> None:
    """Two copies elsewhere have as many bytes: the one on the reader's host is sent."""
    far, near, here = (DeviceMesh([r], hosts=[h]) for r, h in ((0, 0), (1, 1), (2, 1)))
    with mf.FusionDefinition("copies") as fd:
        x = fd.define_tensor([8], mesh=far, layout={}, name="x")
        copy = fd.ops.set(x).on(near)
        fd.add_output(fd.ops.set(x).on(here))
        fd.add_output(copy)
    text = str(mf.compile(fd).host)
    assert "mesh(x=1: 1 on 1*1)" in text
    value = torch.arange(8.0)
    check_everywhere(mf.compile(fd), [value], [value, value])
    layouts = [Layout(far), Layout(near)]
    slow, fast = costs(layouts, Layout(here), (27_000,), 4)
    assert (slow, fast) == (10_000 + 4000, 10_000 + 400)


def test_costs_have_one_unit() -> None:
    """Where hosts of one mesh are not known, elements count for all."""
    known, unknown = DeviceMesh([0], hosts=[0]), DeviceMesh([1])
    goal = Layout(DeviceMesh([2], hosts=[1]))
    found = costs([Layout(known), Layout(unknown)], goal, (100,), 4)
    assert found[0] == found[1]
