"""Instructions in random orders: buffers that such a run makes before they are computed."""

from __future__ import annotations

import torch
from helpers.compiled_suite import launches

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.hir.text.parser import parse

EXPANDED = """
host @expanded on mesh(x=1) {
  input %x: f32[1,3] (x=R)
  launch fused0(%x) -> %e {
    %t: f32[1,3] (x=R) = exp(%x)
    %u: f32[1,3] (x=R) = mul(%t, 2.0)
    %e: f32[4,3] (x=R) = expand(%u, shape=[4,3])
  }
  %y: f32[4,3] (x=R) = mul(%e, 3.0)
  return %y
}"""


def test_a_unit_whose_result_overlaps_itself() -> None:
    x = torch.randn(1, 3)
    with launches():
        result = mf.simulate(parse(EXPANDED), [x], schedule=1)
    torch.testing.assert_close(result.outputs[0], (x.exp() * 6).expand(4, 3))


def test_indices_that_are_not_there_yet_are_none_that_are_out_of_range() -> None:
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("gathered") as fd:
        i = fd.define_tensor([4], torch.int64, mesh, {"x": Shard(0)})
        table = fd.define_tensor([6, 3], mesh=mesh)
        fd.add_output(fd.ops.embedding(fd.ops.set(i).on(mesh, {}), table))
    program, options = mf.compile(fd), Options(check_indices=True, poison=True)
    indices, rows = torch.tensor([5, 0, 3, 3]), torch.randn(6, 3)
    for seed in range(4):
        result = mf.simulate(program, [indices, rows], options=options, schedule=seed)
        assert torch.equal(result.outputs[0], rows[indices])
