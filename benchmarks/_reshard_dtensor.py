"""Bytes that DTensor's planners would move for the same changes of layout; nothing is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
from torch.testing._internal.distributed.fake_pg import FakeStore

from mdfuse import DeviceMesh, Layout, Partial, Shard


@contextmanager
def fake_ranks(n: int) -> Iterator[None]:
    """Be rank 0 of n ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Planner:
    """DTensor's planners for tensors of one shape on one mesh; to be made among `fake_ranks`."""

    def __init__(self, mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
        self.mesh, self.shape = mesh, shape
        self.device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        self.meta = TensorMeta(torch.Size(shape), strides, torch.float32)
        self.planner = DTensorRedistributePlanner(self.device_mesh, self.meta)

    def spec(self, layout: Layout) -> DTensorSpec:
        """Return a layout as DTensor has it."""
        order = tuple(
            ShardOrderEntry(d, tuple(map(self.mesh.axis_index, axes))) for d, axes in layout.splits
        )
        placements = tuple(map(_placement, layout.placements))
        return DTensorSpec(self.device_mesh, placements, self.meta, shard_order=order)

    def elements(self, source: Layout, goal: Layout, *, least: bool) -> float:
        """Return how many elements arrive at the first rank, by the planner of least cost or not.

        Blocks are padded, as DTensor pads them. ValueError where the planner has no plan.
        """
        specs = self.spec(source), self.spec(goal)
        if least:
            plan = self.planner.generate_graph_based_transform_infos(*specs, self.meta.shape)
        else:
            plan = self.planner.generate_greedy_transform_infos(*specs)
        return sum(map(self._arriving, plan))

    def _arriving(self, step: Any) -> float:
        before, after = step.src_dst_placements
        n, shape = self.mesh.shape[step.mesh_dim], [*step.logical_shape]
        if before.is_replicate() or n == 1:
            return 0.0
        if before.is_partial() and after.is_replicate():
            return 2 * (n - 1) * math.prod(shape) / n
        for placement in (before, after):
            if placement.is_shard():
                shape[placement.dim] = -(-shape[placement.dim] // n)
        return float((n - 1) * math.prod(shape))


def _placement(placement: object) -> Any:
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    return TorchPartial(placement.op) if isinstance(placement, Partial) else TorchReplicate()
