"""What a run allocates on a GPU, as its allocator counts it, against what is alive at once."""

from __future__ import annotations

import gc

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream

MIB = 1 << 20
#: A graph has copies of inputs and outputs besides.
EAGER = mf.Options(graph="never")


def peak(comm: mf.Communicator, program: mf.Program, inputs: list[torch.Tensor]) -> int:
    """Bytes that a program and its second run add at their peak to the inputs."""
    local = [
        mf.shard_tensor(x, program.host.types[name].layout, rank=comm.rank).contiguous()
        for name, x in zip(program.host.inputs, inputs, strict=True)
    ]
    local = [x.to(comm.device) for x in local]
    gc.collect()  # what an earlier test left must not go while this one counts
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    program.run(*local, options=EAGER)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    program.run(*local, options=EAGER)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.world(2)
def test_a_chain_holds_two_buffers_at_once(comm: mf.Communicator) -> None:
    """Each op reads one and writes one; 4 MiB on each rank."""
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("chain") as fd:
        x = fd.define_tensor([2048, 1024], mesh=mesh, layout={"tp": Shard(0)})
        for _ in range(10):
            x = fd.ops.exp(x)
        fd.add_output(x)
    assert peak(comm, mf.compile(fd), [torch.zeros(2048, 1024)]) == 2 * 4 * MIB


@pytest.mark.gpu
@pytest.mark.world(2)
def test_a_post_holds_its_buffers_until_its_wait(comm: mf.Communicator) -> None:
    """The partial sums and the total, 4 MiB each; freed, they hold the output.

    A ring would multiply on a second stream, for which the matrix library makes a workspace.
    """
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("post") as fd:
        x = fd.define_tensor([1024, 2048], mesh=mesh, layout={"tp": Shard(1)})
        w = fd.define_tensor([2048, 1024], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.exp(fd.ops.set(x @ w).on(mesh, {})))
    inputs = [torch.zeros(1024, 2048), torch.zeros(2048, 1024)]
    some = torch.ones(8, 8, device=comm.device)
    some @ some  # the matrix library makes its workspace
    program = mf.compile(fd, mf.Options(overlap="never"))
    assert peak(comm, program, inputs) == 2 * 4 * MIB


@pytest.mark.gpu
@pytest.mark.world(2)
def test_a_loop_holds_its_intermediates_for_few_iterations(comm: mf.Communicator) -> None:
    """32 chunks of 1 MiB on 4 streams: the whole result, and 2 buffers on each stream."""
    mesh = DeviceMesh.arange(tp=2)
    stream = Stream(0, 32)
    with mf.FusionDefinition("loop") as fd:
        x = fd.define_tensor([8192, 1024], mesh=mesh)
        for _ in range(4):
            x = fd.ops.exp(x).on(mesh, stream=stream)
        fd.add_output(x)
    program = mf.compile(fd, mf.Options(streams=4))
    assert peak(comm, program, [torch.zeros(8192, 1024)]) <= 32 * MIB + 4 * 2 * MIB
