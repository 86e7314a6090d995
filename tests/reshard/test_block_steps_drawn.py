"""Drawn changes of layouts in which dims are in blocks: into them, out of them, between them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement

MESHES = (
    DeviceMesh.arange(tp=2),
    DeviceMesh.arange(a=2, b=2),
    DeviceMesh.arange(a=2, b=3),
    DeviceMesh([[3, 0], [1, 2]], axes=("p", "q")),
    DeviceMesh.arange(x=4),
    DeviceMesh([4, 2, 7], axes=("q",)),
    DeviceMesh.arange(p=2, q=2).with_hosts([0, 0, 1, 1]),
)


def sizes(draw: random.Random, extent: int) -> list[int]:
    """Sizes of blocks that make up a dim; some have no rows."""
    ends = sorted(draw.randint(0, extent) for _ in range(draw.randint(1, 3)))
    return [b - a for a, b in zip([0, *ends], [*ends, extent], strict=True)]


def drawn(draw: random.Random, mesh: DeviceMesh, shape: tuple[int, ...], op: Placement) -> Layout:
    blocks: list[Any] = [sizes(draw, n) if n and draw.random() < 0.6 else None for n in shape]
    for d, n in enumerate(shape):
        if n and draw.random() < 0.3:
            blocks[d] = draw.choice([k for k in range(1, n + 1) if n % k == 0])
    is_zigzag = draw.random() < 0.3
    dims: list[Placement] = [
        Shard(d, zigzag=True) if is_zigzag else Shard(d, blocks[d]) for d in range(len(shape))
    ]
    placements = {a: draw.choice([*dims, *dims, Replicate(), op]) for a in mesh.axes}
    order = {d: draw.sample(axes, len(axes)) for d, axes in Layout(mesh, placements).splits}
    for d, axes in order.items():  # some of the inner ones go through all blocks as one
        plain = axes[draw.randint(1, len(axes)) :]
        placements |= dict.fromkeys(plain, Shard(d))
        parts = math.prod(map(mesh.axis_size, plain))
        may = isinstance(blocks[d], int) and blocks[d] % parts == 0
        if (may or is_zigzag) and draw.random() < 0.5:
            order[d] = [*plain, *axes[: len(axes) - len(plain)]]  # they take whole blocks
    return Layout(mesh, placements, order)


def pairs(seed: int, n: int) -> Iterator[tuple[Layout, Layout, tuple[int, ...], int]]:
    for each in range(seed, seed + n):
        draw = random.Random(each)
        one = draw.choice(MESHES)
        other = one if draw.random() < 0.6 else draw.choice(MESHES)
        shape = (draw.randint(0, 13), draw.randint(1, 9))[: draw.randint(1, 2)]
        op = draw.choice([Partial(), Partial("max"), Replicate()])
        yield drawn(draw, one, shape, op), drawn(draw, other, shape, op), shape, each


@pytest.mark.parametrize("first", range(0, 240, 30))
def test_drawn_changes(first: int) -> None:
    for source, goal, shape, seed in pairs(first, 30):
        x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).double()
        with mf.FusionDefinition("drawn") as fd:
            fd.add_output(fd.ops.set(fd.define_tensor(shape, x.dtype, source)).on(goal))
        check_everywhere(mf.compile(fd), [x], [x], exact=True)
