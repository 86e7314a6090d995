"""Instructions in random orders: buffers that such a run makes before they are computed."""

from __future__ import annotations

import torch
from helpers.compiled_suite import launches

import mdfuse as mf
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
