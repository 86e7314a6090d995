"""A tensor-parallel MLP as Megatron-LM splits it, and its sequence-parallel variant.

torchrun --nproc-per-node 4 examples/tp_mlp.py                 # on 4 processes
torchrun --nproc-per-node 4 examples/tp_mlp.py --sequence      # the variant
python examples/tp_mlp.py                                      # simulates 4 ranks
mdfuse dump examples/tp_mlp.py --mesh dp=2,tp=4                # shows the program

The arithmetic is that of one device. The layouts of two weights make each rank compute a slice of
the hidden units, and leave one communication: an all-reduce of the partial sums. When activations
are split by rows outside of the MLP, it becomes an all-gather before and a reduce-scatter after.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.cli.run_command import run_build

TOKENS, WIDTH, HIDDEN = 96, 64, 256


def build(
    mesh: DeviceMesh, is_sequence_parallel: bool = False
) -> tuple[mf.FusionDefinition, list[torch.Tensor]]:
    """y = x + gelu(x w1' + b1) w2' + b2, the hidden units split along `tp`."""
    rows = {"dp": Shard(0)} if "dp" in mesh.axes else {}
    if is_sequence_parallel:
        rows["tp"] = Shard(0)
    with mf.FusionDefinition("mlp") as fd:
        x = fd.define_tensor([TOKENS, WIDTH], mesh=mesh, layout=rows)
        w1 = fd.define_tensor([HIDDEN, WIDTH], mesh=mesh, layout={"tp": Shard(0)})
        b1 = fd.define_tensor([HIDDEN], mesh=mesh, layout={"tp": Shard(0)})
        w2 = fd.define_tensor([WIDTH, HIDDEN], mesh=mesh, layout={"tp": Shard(1)})
        b2 = fd.define_tensor([WIDTH], mesh=mesh)

        h = fd.ops.gelu(fd.ops.linear(x, w1, b1))
        y = x + fd.ops.linear(h, w2, b2)
        fd.add_output(fd.ops.set(y).on(mesh, rows))

    generator = torch.Generator().manual_seed(0)
    shapes = ([TOKENS, WIDTH], [HIDDEN, WIDTH], [HIDDEN], [WIDTH, HIDDEN], [WIDTH])
    return fd, [torch.randn(shape, generator=generator) / 8 for shape in shapes]


if __name__ == "__main__":
    run_build(partial(build, is_sequence_parallel="--sequence" in sys.argv))
