"""Instructions in random orders: buffers that such a run makes before they are computed."""

from __future__ import annotations

import pytest
import torch
from helpers.compiled_suite import launches
from passes.test_count_rows_device import by_loop, given, layer, router

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.hir.text.parser import parse
from mdfuse.ir import groups
from mdfuse.simulation.shuffled import _filled

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


def test_stand_ins_lie_as_what_they_stand_for() -> None:
    """A compiled unit takes operands of one form alone."""
    whole = torch.arange(15).view(3, 5)
    for x in (whole, whole[:, :2], whole.T, whole[:0], whole[1:2, 3:]):
        stand_in = _filled(x, 7)
        assert (stand_in.shape, stand_in.stride()) == (x.shape, x.stride())
        assert torch.equal(stand_in, torch.full_like(x, 7))
    floats = torch.ones(2)
    assert _filled(floats, 7) is floats


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_counts_that_are_not_there_yet(is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's counts are columns of all; it turns its rows by them."""
    monkeypatch.setattr(groups, "may_look", lambda _: not is_on_gpu)
    values = given(13, 5, router(13, 5, 1))
    options = Options(counts="device", poison=True, compile="always")
    with launches():
        program = mf.compile(layer({"ep": 2}, 13, 5, 1), options)
        assert any(i.fn == "rows_to_experts" for i in program.host.walk())
        for seed in range(3):
            results = mf.simulate(program, values, schedule=seed, options=options).outputs
            for result, want in zip(results, by_loop(values, 2), strict=True):
                torch.testing.assert_close(result, want)
