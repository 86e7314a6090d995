"""A sequence-parallel linear pair whose communications overlap with its matmuls.

torchrun --nproc-per-node 4 examples/overlap.py                # on 4 processes
python examples/overlap.py                                     # simulates 4 ranks
mdfuse dump examples/overlap.py --mesh tp=4                    # shows the two loops
mdfuse dump examples/overlap.py --mesh tp=4 --rank 2           # what rank 2 runs

One `Stream` per matmul is all that differs from the plain program. The first gathers the rows of x
along a ring, rank by rank, and multiplies what is there; the second multiplies the rows of one rank
after the other and sends each off to be added up while the next is computed.
"""

from __future__ import annotations

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream
from mdfuse.cli.run_command import run_build

TOKENS, WIDTH, HIDDEN = 96, 64, 256


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[torch.Tensor]]:
    """y = relu(x w1) w2; rows split along `tp` outside, hidden units inside."""
    by_rank = Stream(0, mesh.axis_size("tp"), rotate="tp")
    with mf.FusionDefinition("overlap") as fd:
        x = fd.define_tensor([TOKENS, WIDTH], mesh=mesh, layout={"tp": Shard(0)})
        w1 = fd.define_tensor([WIDTH, HIDDEN], mesh=mesh, layout={"tp": Shard(1)})
        w2 = fd.define_tensor([HIDDEN, WIDTH], mesh=mesh, layout={"tp": Shard(0)})

        h = (x @ w1).on(mesh, {"tp": Shard(1)}, stream=by_rank)
        y = (fd.ops.relu(h) @ w2).on(mesh, {"tp": Shard(0)}, stream=by_rank)
        fd.add_output(y)

    generator = torch.Generator().manual_seed(0)
    shapes = ([TOKENS, WIDTH], [WIDTH, HIDDEN], [HIDDEN, WIDTH])
    return fd, [torch.randn(shape, generator=generator) / 8 for shape in shapes]


if __name__ == "__main__":
    run_build(build)
