"""Host programs on real ranks: from text, with preallocated outputs, run again and again."""

from __future__ import annotations

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir

TEXT = """
host @scatter on m0=mesh(x=1: 1), m1=mesh(x=3: 2 0 1) {
  input %x: f32[4,6] m0(x=R)
  %y.send: f32[6,4] m0(x=R) = permute(%x, dims=[1,0]) contiguous
  %y.recv: f32[2,4] of [6,4] m1(x=S0) = alloc
  %c0 = post scatter(%y.send) -> %y.recv f32[4,6] m0(x=R) => m1(x=S1) axis=x dim=1
  wait %c0
  %y: f32[4,2] of [4,6] m1(x=S1) = permute(%y.recv, dims=[1,0])
  %z: f32[4,2] of [4,6] m1(x=S1) = mul(%y, 2.0) contiguous
  return %z
}"""
PLACE = {2: 0, 0: 1, 1: 2}


def whole(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.world(4)
def test_a_program_from_text(comm: mf.Communicator) -> None:
    evaluator = mf.HostIrEvaluator(hir.parse(TEXT), comm, mf.Options(poison=True))
    for seed in range(3):
        x = whole(seed).to(comm.device) if comm.rank == 1 else None
        (got,) = evaluator.run({"x": x})
        if comm.rank not in PLACE:
            assert got is None
            continue
        want = 2 * whole(seed).chunk(3, 1)[PLACE[comm.rank]]
        assert torch.equal(got.cpu(), want)
        assert got.stride() == (2, 1)


@pytest.mark.world(4)
def test_preallocated_outputs(comm: mf.Communicator) -> None:
    mesh = DeviceMesh([0, 1, 2, 3])
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([8, 3], torch.float32, mesh, {"x": Shard(0)})
        fd.add_output(fd.ops.set(x * 2).on(mesh, {}))
        fd.add_output(x + 1)
    program = mf.compile(fd)
    mine = torch.full((2, 3), float(comm.rank), device=comm.device)
    out = [torch.empty(8, 3, device=comm.device), torch.empty(2, 3, device=comm.device)]
    places = [b.data_ptr() for b in out]
    for _ in range(2):
        got = program.run(mine, out=out)
        assert [b.data_ptr() for b in got] == places
        rows = torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3)
        assert torch.equal(got[0].cpu(), 2 * rows)
        assert torch.equal(got[1].cpu(), torch.full((2, 3), comm.rank + 1.0))


@pytest.mark.world(4)
def test_a_missing_buffer_is_refused_on_every_rank(comm: mf.Communicator) -> None:
    program = hir.parse(TEXT)
    x = whole(0).to(comm.device) if comm.rank == 1 else None
    out = None if comm.rank not in PLACE else torch.empty(4, 3, device=comm.device)
    with pytest.raises(mf.ProgramError, match="shape"):
        mf.HostIrEvaluator(program, comm).run({"x": x, "z": out})


@pytest.mark.world(4)
def test_options_of_one_run(comm: mf.Communicator) -> None:
    """Another plan for other options, kept as well."""
    mesh = DeviceMesh([0, 1, 2, 3])
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([8, 3], torch.float32, mesh, {"x": Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    program = mf.compile(fd)
    mine = torch.full((2, 3), float(comm.rank), device=comm.device)
    rows = torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3)
    for options in (None, mf.Options(poison=True), None, mf.Options(poison=True)):
        (got,) = program.run(mine, options=options)
        assert torch.equal(got.cpu(), rows)
