"""Values that are outputs and are read, posted and resharded besides: each role has its needs."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement
from mdfuse.passes.segmentation import ShouldMerge

MESHES = (
    DeviceMesh.arange(x=2),
    DeviceMesh.arange(y=2, x=2),
    DeviceMesh([[3, 1, 0], [2, 5, 4]]),
    DeviceMesh([2, 0, 3]),
)


def test_an_output_in_another_memory_order_is_posted() -> None:
    """It is written in the order it has on one device; what is posted is a dense copy."""
    mesh = MESHES[0]
    with mf.FusionDefinition("both") as fd:
        x = fd.define_tensor([4, 6], mesh=mesh, layout={"x": Partial()})
        y = fd.ops.neg(x.permute(1, 0)).on(mesh, {"x": Partial()})
        fd.add_output(y)
        fd.add_output(fd.ops.set(y).on(mesh, {}))
    program = mf.compile(fd)
    whole = torch.randn(4, 6)
    check_everywhere(program, [whole], [-whole.T, -whole.T])
    result = mf.simulate(program, [whole])
    assert all(y.stride() == (1, 6) for y, _ in result.per_rank)


def layout(draw: random.Random, rank: int) -> Layout:
    mesh = draw.choice(MESHES)
    choices: list[Placement] = [Replicate(), *map(Shard, range(rank))]
    return Layout(mesh, {axis: draw.choice(choices) for axis in mesh.axes})


def step(draw: random.Random, h: mf.ops.Handle, x: Tensor) -> tuple[mf.ops.Handle, Tensor]:
    """One more operation, in both worlds."""
    match draw.randrange(6):
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


@pytest.mark.parametrize("seed", range(150))
def test_every_value_may_be_an_output(seed: int) -> None:
    fd, x, expected, merge = many(seed)
    check_everywhere(mf.compile(fd, should_merge=merge), [x], expected, exact=True)
