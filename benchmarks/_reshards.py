"""Plans of one reshard, and what DTensor.redistribute makes of the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _ranks import Ranks
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh

import mdfuse as mf
from mdfuse import Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement

_SHAPE = (64, 64)

#: The same placements in both vocabularies.
_PLACEMENTS: dict[str, tuple[Placement, Any]] = {
    "Shard(0)": (Shard(0), dtensor.Shard(0)),
    "Shard(1)": (Shard(1), dtensor.Shard(1)),
    "Partial": (Partial("sum"), dtensor.Partial("sum")),
    "Replicate": (Replicate(), dtensor.Replicate()),
}

CHANGES = (
    ("Shard(0)", "Replicate"),
    ("Shard(0)", "Shard(1)"),
    ("Partial", "Shard(0)"),
    ("Partial", "Replicate"),
)


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """One change of layout, by both.

    Attributes:
        name: what changes into what.
        sizes: the global shape.
        ours: runs the program; returns this rank's part.
        theirs: redistributes a DTensor; returns a DTensor.
        want: this rank's part, float64.
    """

    name: str
    sizes: str
    ours: Callable[[], Tensor]
    theirs: Callable[[], Any]
    want: Tensor


def reshards(ranks: Ranks) -> list[Reshard]:
    """One of each of `CHANGES`, over all ranks."""
    device_mesh = init_device_mesh(ranks.device.type, (ranks.comm.size,))
    return [_reshard(ranks, device_mesh, before, after) for before, after in CHANGES]


def _reshard(ranks: Ranks, device_mesh: Any, before: str, after: str) -> Reshard:
    (source, their_source), (goal, their_goal) = _PLACEMENTS[before], _PLACEMENTS[after]
    with mf.FusionDefinition("reshard") as fd:
        x = fd.define_tensor(_SHAPE, torch.float32, ranks.mesh, {"tp": source})
        fd.add_output(fd.ops.set(x).on(ranks.mesh, {"tp": goal}))
    program = mf.compile(fd, mf.Options(graph="never"))
    mine, whole = _input(ranks, source)
    theirs = dtensor.DTensor.from_local(mine, device_mesh, [their_source], run_check=False)
    layout = Layout(ranks.mesh, {"tp": goal})
    return Reshard(
        name=f"reshard {before} -> {after}",
        sizes=f"f32 {list(_SHAPE)}",
        ours=lambda: program.run(mine)[0],
        theirs=lambda: theirs.redistribute(device_mesh, [their_goal]),
        want=mf.shard_tensor(whole, layout, rank=ranks.comm.rank),
    )


def _input(ranks: Ranks, source: Placement) -> tuple[Tensor, Tensor]:
    """This rank's part, and the whole in float64; the parts of a partial value are summed."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(source, Partial):
        parts = torch.randn((ranks.comm.size, *_SHAPE), generator=generator)
        return parts[ranks.comm.rank].to(ranks.device), parts.double().sum(0)
    whole = torch.randn(_SHAPE, generator=generator)
    return ranks.local(whole, Layout(ranks.mesh, {"tp": source})), whole.double()
