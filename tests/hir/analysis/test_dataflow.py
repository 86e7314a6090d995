"""Names of one memory, and which elements of it they stand for."""

from __future__ import annotations

import pytest

from mdfuse import hir
from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unroll import write

PROGRAM = """host @views on mesh(tp=2) {
  input %x: f32[4,6] of [8,6] (tp=S0)
  %y: f32[2,4,6] of [2,8,6] (tp=S1) = alloc(fill=0.0)
  %half: f32[2,2,6] of [2,8,6] (tp=S1, chunk(1,2,1)) = chunk(%y)
  %first: f32[4,6] of [8,6] (tp=S0) = select(%y, dim=0, index=0)
  %last: f32[4,6] of [8,6] (tp=S0) = select(%y, dim=0, index=-1)
  %top: f32[2,6] of [8,6] (tp=S0, chunk(0,2,0)) = chunk(%first)
  %low: f32[2,6] of [8,6] (tp=S0, chunk(0,2,1)) = select(%half, dim=-3, index=1)
  %turned: f32[6,4] of [6,8] (tp=S1) = permute(%first, dims=[1,0])
  %part: f32[2,6] of [8,6] (tp=S0, chunk(0,2,1)) = chunk(%x)
  %z: f32[2,6] of [8,6] (tp=S0, chunk(0,2,1)) = add(%low, %part)
  return %turned
}
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_which_views_share_elements(rank: int) -> None:
    flow = dataflow(write(project(hir.parse(PROGRAM), rank)))
    assert flow.memory("low") == flow.memory("y") == "y"
    assert flow.region("low") == ((1, 2), (4 * rank + 2, 4 * rank + 4), (0, 6))
    assert flow.region("part") == ((4 * rank + 2, 4 * rank + 4), (0, 6))
    assert flow.region("turned") is None
    apart = [("first", "last"), ("top", "half"), ("top", "low"), ("first", "low")]
    assert not any(flow.meet(*pair) for pair in apart)
    shared = [("y", "low"), ("last", "low"), ("half", "first"), ("turned", "low"), ("x", "part")]
    assert all(flow.meet(*pair) for pair in shared)


def test_a_row_of_a_split_dim_is_counted_by_the_rank() -> None:
    text = """host @rows on mesh(tp=2) {
  input %x: f32[4,6] of [8,6] (tp=S0)
  %row: f32[6] (tp=varies) = select(%x, dim=0, index=1)
  %y: f32[6] (tp=varies) = mul(%row, 2.0)
  return %x
}
"""
    flow = dataflow(write(project(hir.parse(text), 1)))
    assert flow.region("row") == ((5, 6), (0, 6))
