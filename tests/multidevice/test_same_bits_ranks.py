"""Results with the same bits on real ranks as on one simulated rank, whatever the library."""

from __future__ import annotations

import pytest
import torch
from helpers.drawn import drawn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

SAME = mf.Options(same_bits=True)


def step(mesh: DeviceMesh, rows: int, dtype: torch.dtype) -> mf.Program:
    """A step of two layers, its first matrix split by columns, its second one by rows."""
    tp = "tp" in mesh.axes
    columns, along = ({"tp": Shard(0)}, {"tp": Shard(1)}) if tp else ({}, {})
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([rows, 12], dtype, mesh=mesh, layout={"dp": Shard(0)})
        w = fd.define_tensor([22, 12], dtype, mesh=mesh, layout=columns)
        v = fd.define_tensor([5, 22], dtype, mesh=mesh, layout=along)
        y = fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w)), v)
        loss = (y * y).mean()
        dw, dv = mf.grad(loss, [w, v])
        fd.add_output(loss)
        fd.add_output(w - dw * 0.5, reuse=w)
        fd.add_output(v - dv * 0.5, reuse=v)
        fd.add_output(y)
    return mf.compile(fd, SAME)


def on_ranks(comm: mf.Communicator, program: mf.Program, inputs: list[Tensor]) -> None:
    """Check the program's results, and those of a second run, against one simulated rank."""
    mesh = program.fusion.layout(program.fusion.inputs[0]).mesh
    alone = DeviceMesh.of((1,) * mesh.ndim, [0], mesh.axes)
    simulated = step(alone, len(inputs[0]), inputs[0].dtype)
    layouts = [program.fusion.layout(n) for n in program.fusion.inputs]
    is_here, state = comm.rank in mesh, inputs[1:]
    given = [
        mf.shard_tensor(x, of, rank=comm.rank).clone().to(comm.device) if is_here else None
        for x, of in zip(inputs, layouts, strict=True)
    ]
    for _ in range(2):
        results = program.run(*given)
        if not is_here:
            assert results == [None] * 4
            continue
        expected = mf.simulate(simulated, [inputs[0], *state]).outputs
        assert results[1] is given[1] and results[2] is given[2]
        for name, found, whole in zip(program.fusion.outputs, results, expected, strict=True):
            part = mf.shard_tensor(whole, program.fusion.layout(name), rank=comm.rank)
            if comm.device.type == "cpu":
                assert torch.equal(found, part), name
            else:
                torch.testing.assert_close(found.cpu(), part)
        state = expected[1:3]


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((rows, 12), (22, 12), (5, 22))
    return [drawn(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "ranks"), [(16, [0]), (13, [2, 1]), (12, [3, 1, 0]), (16, [*range(4)])]
)
@pytest.mark.world(4)
def test_data_parallel(
    comm: mf.Communicator, rows: int, ranks: list[int], dtype: torch.dtype
) -> None:
    """Meshes of 1, 2, 3 and 4 ranks of a job, in any order; rows of 12 are gathered for leaves."""
    on_ranks(comm, step(DeviceMesh(ranks, axes=["dp"]), rows, dtype), inputs(rows, dtype))


@pytest.mark.world(4)
def test_tensor_parallel_beside(comm: mf.Communicator) -> None:
    on_ranks(comm, step(DeviceMesh.arange(dp=2, tp=2), 9, torch.float32), inputs(9))


@pytest.mark.world(2)
def test_ranks_with_other_meshes_do_not_run(comm: mf.Communicator) -> None:
    size = 2 - comm.rank  # one on rank 1
    program = step(DeviceMesh.of((size,), range(size), ["dp"]), 8, torch.float32)
    here = [torch.zeros(4, 12), *inputs(8)[1:]]
    given = [None if comm.rank else x.to(comm.device) for x in here]
    with pytest.raises(mf.ProgramError, match="another program"):
        program.run(*given)
