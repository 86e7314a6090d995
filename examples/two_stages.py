"""A pipeline of two stages on disjoint halves of the ranks, each stage tensor-parallel.

torchrun --nproc-per-node 4 examples/two_stages.py        # on 4 processes: stages of 2 ranks
python examples/two_stages.py                             # simulates 4 ranks
mdfuse dump examples/two_stages.py --rank 3               # what a rank of the second stage runs

One fusion spans both meshes. The activations are handed over split by rows: the first stage
reduce-scatters them, each of its ranks sends its rows to one rank of the second stage, and that
stage gathers them. No rank sends the same row twice.
"""

from __future__ import annotations

from typing import Any

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.cli.run_command import run_build

BATCH, WIDTH, HIDDEN = 32, 64, 128


def halves(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """The first and the second half of the ranks, each a mesh with one axis `tp`."""
    if mesh.size % 2:
        raise mf.debug.MeshError(
            f"two stages on {mesh}",
            because="each stage gets half of the ranks",
            hint="start an even number of ranks, or simulate them: --sim tp=4",
        )
    half = mesh.size // 2
    first, second = mesh.ranks[:half], mesh.ranks[half:]
    return DeviceMesh(first, axes=("tp",)), DeviceMesh(second, axes=("tp",))


def stage(fd: mf.FusionDefinition, x: Any, mesh: DeviceMesh) -> Any:
    """x + gelu(x w1') w2' on a mesh, the hidden units split along `tp`; its rows come out split."""
    w1 = fd.define_tensor([HIDDEN, WIDTH], mesh=mesh, layout={"tp": Shard(0)})
    w2 = fd.define_tensor([WIDTH, HIDDEN], mesh=mesh, layout={"tp": Shard(1)})
    y = x + fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w1)), w2)
    return fd.ops.set(y).on(mesh, {"tp": Shard(0)})


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[torch.Tensor]]:
    """Two such stages; the input is whole on every rank of the first half."""
    first, second = halves(mesh)
    with mf.FusionDefinition("two_stages") as fd:
        x = fd.define_tensor([BATCH, WIDTH], mesh=first)
        handed_over = fd.ops.set(stage(fd, x, first)).on(second, {"tp": Shard(0)})
        fd.add_output(stage(fd, handed_over, second))

    generator = torch.Generator().manual_seed(0)
    shapes = ([BATCH, WIDTH], *([HIDDEN, WIDTH], [WIDTH, HIDDEN]) * 2)
    return fd, [torch.randn(shape, generator=generator) / 8 for shape in shapes]


if __name__ == "__main__":
    run_build(build)
