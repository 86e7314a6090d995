"""Programs with several outputs."""

from __future__ import annotations

import random

import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Replicate, Shard
from mdfuse.layouts.layout import Placement
from mdfuse.passes.segmentation import ShouldMerge

MESHES = (
    DeviceMesh.arange(x=2),
    DeviceMesh.arange(y=2, x=2),
    DeviceMesh([[3, 1, 0], [2, 5, 4]]),
    DeviceMesh([2, 0, 3]),
)


def layout(draw: random.Random, rank: int) -> Layout:
    mesh = draw.choice(MESHES)
    choices: list[Placement] = [Replicate(), *map(Shard, range(rank))]
    return Layout(mesh, {axis: draw.choice(choices) for axis in mesh.axes})


def step(draw: random.Random, h: mf.ops.Handle, x: Tensor) -> tuple[mf.ops.Handle, Tensor]:
    """One more operation, in both worlds."""
    match draw.randrange(8):
        case 0:
            return h.permute(1, 0), x.T
        case 1:
            return mf.ops.relu(h), x.relu()
        case 2:
            return h + 1, x + 1
        case 3:
            return h.sum(0, keepdim=True) + h, x.sum(0, keepdim=True) + x
        case 4:
            return mf.ops.set(h), x
        case 5:
            dim, down = draw.randrange(2), draw.random() < 0.5
            both, plain = h.sort(dim=dim, descending=down), x.sort(dim=dim, descending=down)
            return both.values, plain.values
        case 6:
            dim = draw.randrange(2)
            both, plain = h.sort(dim=dim, stable=True), x.sort(dim=dim, stable=True)
            if draw.random() < 0.5:
                both.indices.on(layout(draw, 2))
            return both.indices + both.values, plain.indices + plain.values
        case _:
            return h[:, :], x


def many(seed: int) -> tuple[mf.FusionDefinition, Tensor, list[Tensor], ShouldMerge | None]:
    """A drawn definition with several outputs, its input, what it gives, and how to merge."""
    draw = random.Random(seed)
    shape = draw.choice(((4, 6), (5, 3), (1, 7), (2, 2)))
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()
    values = [x]
    expected = []
    with mf.FusionDefinition("many") as fd:
        handles = [fd.define_tensor(shape, torch.float64, layout(draw, 2))]
        for _ in range(draw.randint(2, 7)):
            i = draw.randrange(len(handles))
            h, value = step(draw, handles[i], values[i])
            if draw.random() < 0.5:
                h = h.on(layout(draw, 2))
            handles.append(h)
            values.append(value)
            if draw.random() < 0.7:
                fd.add_output(h)
                expected.append(value)
        fd.add_output(handles[-1] * 2)
        expected.append(values[-1] * 2)
    merge = draw.choice((None, mf.segmentation.merge_local, mf.segmentation.merge_nothing))
    return fd, x, expected, merge
