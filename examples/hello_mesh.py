"""Two changes of layout on a mesh, and what they become.

torchrun --nproc-per-node 4 examples/hello_mesh.py      # on 4 processes
python examples/hello_mesh.py                           # simulates 4 ranks
mdfuse run examples/hello_mesh.py --sim tp=8            # simulates 8, compares with one device
"""

from __future__ import annotations

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Replicate, Shard


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[torch.Tensor]]:
    """Column sums, and twice the matrix by columns, of a matrix that is split by rows."""
    axis = mesh.axes[-1]
    with mf.FusionDefinition("hello_mesh") as fd:
        x = fd.define_tensor([8, 6], mesh=mesh, layout={axis: Shard(0)})

        # Each rank adds up its own rows; that the sums be whole everywhere makes it an all-reduce.
        sums = fd.ops.set(x.sum(0)).on(mesh, {axis: Replicate()})
        # From rows to columns: an all-to-all. 6 columns on 4 ranks are 2, 2, 2 and none.
        columns = fd.ops.set(x).on(mesh, {axis: Shard(1)})

        fd.add_output(sums)
        fd.add_output(columns * 2)
    return fd, [torch.arange(48.0).reshape(8, 6)]


def main() -> None:
    comm = mf.init()  # finds the other ranks, whichever launcher started them
    mesh = DeviceMesh.arange(tp=comm.size if comm.size > 1 else 4)
    fd, (x,) = build(mesh)
    program = mf.compile(fd)
    if comm.rank == 0:
        print(program, end="\n\n")

    if comm.size == 1:  # no launcher: every rank in this process
        for rank, (sums, columns) in enumerate(mf.simulate(program, [x]).per_rank):
            print(f"rank {rank}: sums {sums.tolist()}, columns {tuple(columns.shape)}")
        return
    mine = mf.shard_tensor(x, mesh, {"tp": Shard(0)}, rank=comm.rank).to(comm.device)
    sums, columns = program.run(mine)
    print(f"rank {comm.rank}: sums {sums.tolist()}, columns {tuple(columns.shape)}", flush=True)


if __name__ == "__main__":
    main()
