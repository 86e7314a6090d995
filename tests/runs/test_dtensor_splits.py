"""How axes split one dim: as torch cuts it, and back again."""

from __future__ import annotations

import random

import torch
from torch.distributed.tensor.placement_types import _StridedShard

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard
from mdfuse.runs.dtensor_splits import from_torch, to_torch


def test_dims_that_several_axes_split_as_torch_does() -> None:
    """Drawn placements: each rank has what torch's own cutting gives it; and back again."""
    mesh, counterparts = DeviceMesh.arange(a=2, b=3, c=2), 0
    for seed in range(400):
        draw = random.Random(seed)
        axes = [a for a in mesh.axes if draw.random() < 0.8]
        split = [(a, mesh.axis_size(a), draw.choice([1, 1, 2, 3, 4, 6])) for a in axes]
        n = draw.choice([12, 24, 48, 60, 72, 13, 30])
        found = from_torch(split, n)
        if found is None:
            continue
        shards = {a: Shard(0, None if a in found.plain else found.blocks) for a in axes}
        layout = Layout(mesh, shards, {0: found.order}).normalized(1)
        counterparts += 1
        for rank in mesh.ranks:
            part, at = torch.arange(n), dict(zip(mesh.axes, mesh.coordinate(rank), strict=True))
            for a, size, factor in split:
                cut = _StridedShard(0, split_factor=factor)
                part = cut._split_tensor(part, size, with_padding=False)[0][at[a]]
            assert torch.equal(mf.shard_tensor(torch.arange(n), layout, rank=rank), part), layout
        factors = to_torch(layout, 0, n)
        assert factors is not None
        again = from_torch([(a, size, factors[a]) for a, size, _ in split], n)
        assert again == from_torch(split, n)
    assert counterparts > 100
