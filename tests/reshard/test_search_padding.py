"""Tensors of few rows for each rank: what arrives, beside all ways of two exchanges."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.communication import Communication
from mdfuse.reshard import steps, with_type

MESHES = (DeviceMesh.arange(a=2, b=4), DeviceMesh.arange(a=2, b=2, c=2))
SHAPES = ((13, 9), (5, 7), (3, 2), (9,))


def arriving(source: Layout, goal: Layout, shape: tuple[int, ...]) -> Any:
    """What the steps bring to each rank, counted on their messages."""
    found = [with_type(step, shape, torch.uint8) for step in steps(source, goal, shape)]
    posts = [step for step in found if isinstance(step, Communication)]
    return np.array([sum(post.bytes_received(r) for post in posts) for r in source.mesh.ranks])


def held(layout: Layout, shape: tuple[int, ...]) -> Any:
    """Which elements each rank has, cut by torch."""
    every = torch.arange(math.prod(shape)).reshape(shape)
    out = np.zeros((layout.mesh.size, math.prod(shape)), bool)
    for at, has in zip(np.ndindex(*layout.mesh.shape), out, strict=True):
        part = every
        for dim, axes in layout.splits:
            for axis in axes:
                i = layout.mesh.axis_index(axis)
                chunks = part.chunk(layout.mesh.shape[i], dim)
                part = chunks[at[i]] if at[i] < len(chunks) else part.narrow(dim, 0, 0)
        has[part.reshape(-1).numpy()] = True
    return out


def drawn(seed: int) -> tuple[Layout, Layout, tuple[int, ...]]:
    draw = random.Random(seed)
    mesh, shape = draw.choice(MESHES), draw.choice(SHAPES)
    kinds = [Replicate(), *map(Shard, range(len(shape)))]
    source = {a: draw.choice([*kinds, Partial(), Partial()]) for a in mesh.axes}
    source[draw.choice(mesh.axes)] = Partial()
    return Layout(mesh, source), Layout(mesh, {a: draw.choice(kinds) for a in mesh.axes}), shape


@pytest.mark.parametrize("seed", range(40))
def test_no_two_exchanges_bring_much_less(seed: int) -> None:
    """At most a fifth less at the worst rank: each rank that reduces has all terms sent to it."""
    source, goal, shape = drawn(seed)
    terms = math.prod(map(source.mesh.axis_size, source.partial_axes))
    has, needs = held(source, shape), held(goal, shape)
    kinds = [Replicate(), *map(Shard, range(len(shape)))]
    least = math.inf
    for chosen in product(kinds, repeat=source.mesh.ndim):
        way = held(Layout(source.mesh, dict(zip(source.mesh.axes, chosen, strict=True))), shape)
        reduced = terms * way.sum(1) - (way & has).sum(1)
        least = min(least, int((reduced + (needs & ~way).sum(1)).max()))
    assert arriving(source, goal, shape).max() <= least * 5 / 4, f"{source} -> {goal} of {shape}"


def test_the_worst_of_one_step_is_the_best_of_the_next() -> None:
    """Each rank reduces 7 or 6 of its 3 columns or fewer, and lacks the other columns after that.

    So all of its rows arrive once, 63 or 54 elements; padded to 3 columns each, 84 would.
    """
    mesh = MESHES[0]
    source = Layout(mesh, {"a": Partial(), "b": Shard(1)})
    goal = Layout(mesh, {"a": Shard(0)})
    assert arriving(source, goal, (13, 9)).tolist() == [63] * 4 + [54] * 4


def test_padding_is_sent_where_it_is_little() -> None:
    def kinds(mesh: DeviceMesh, extent: int) -> list[str]:
        return [step.kind for step in steps(Layout(mesh, {"x": Shard(0)}), Layout(mesh), (extent,))]

    two = DeviceMesh.arange(x=4, y=2)
    found = [kinds(two, n) for n in (64, 127, 31, 5)]
    assert found == [["Allgather"], ["Allgather"], ["Exchange"], ["Exchange"]]
    assert kinds(DeviceMesh.arange(x=4), 5) == ["Allgather"]  # the row of one axis alone


@pytest.mark.parametrize("shape", [(4, 32, 8), (5, 6, 96), (13, 24, 40), (15, 64, 8)], ids=str)
@pytest.mark.parametrize("sizes", [{"dp": 2, "fsdp": 8}, {"fsdp": 8, "dp": 4}], ids=str)
def test_an_axis_that_is_whole_at_the_end_brings_parts_alone(
    sizes: dict[str, int], shape: tuple[int, ...]
) -> None:
    """Terms of all ranks are scattered along the axis that stays split; the other sums parts."""
    mesh = DeviceMesh.arange(**sizes)
    terms = Layout(mesh, dict.fromkeys(sizes, Partial()))
    goal = Layout(mesh, {"fsdp": Shard(0)})
    along, held = np.zeros(mesh.size, int), goal.local_shape(shape)
    found = [with_type(step, shape, torch.uint8) for step in steps(terms, goal, shape)]
    for step in found:
        assert isinstance(step, Communication)
        before, after = step.source, step.destination
        changed = [a for a in sizes if before.placement(a) != after.placement(a)]
        assert len(changed) == 1 or step.reduce_op is None, found
        if "dp" in changed:
            along += np.array([step.bytes_received(r) for r in mesh.ranks])
    part, n = math.prod(held), sizes["dp"]
    assert along.max() <= math.ceil(2 * (n - 1) / n * part * 65 / 64), found
