"""Blocks and calls: what prints reads back, what they compute, and what a rank has of them."""

from __future__ import annotations

import pytest
import torch
from helpers.calls import CALLS, TWO_MESHES, ordered
from helpers.golden import Golden

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.block_calls import chunks_of, per_index
from mdfuse.hir.program import mesh_of_block
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out


def test_what_prints_reads_back() -> None:
    program = hir.parse(TWO_MESHES)
    assert str(program) == TWO_MESHES.rstrip()
    for rank in (0, 1):
        local = project(program, rank)
        assert hir.parse(str(local)) == local


ORDERS = {
    "by turns": CALLS,
    "all first": sorted(CALLS, key=lambda c: ("F0", "T01", "F1").index(c.split()[1][:-3])),
    "backwards": [f"call {b}({k})" for k in (2, 1, 0) for b in ("F0", "T01", "F1")],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_each_order_that_keeps_to_the_reads_computes_the_same(order: str, seed: int | None) -> None:
    program = hir.parse(ordered(*ORDERS[order]))
    x = torch.arange(5.0)
    found = mf.simulate(program, per_rank=[{"x": x}, {}], schedule=seed).per_rank
    y, s = found[1]
    assert torch.equal(y, x * x + torch.tensor([0.0, 0, 1, 1, 2]))
    assert torch.equal(s, (x * x).sum())
    assert found[0] == [None, None]


def test_a_rank_has_the_calls_of_blocks_that_it_has_a_part_in(golden: Golden) -> None:
    golden(str(project(hir.parse(TWO_MESHES), 0)))


def test_written_out_names_carry_the_index() -> None:
    local = written_out(project(hir.parse(ordered(*ORDERS["backwards"])), 0))
    made = [n for i in local for n in i.outputs if n.startswith("h")]
    assert made == ["h@2", "h@1", "h@0"]
    assert local.types["h@1"].layout == local.types["x.i@1"].layout


def test_a_loop_may_stand_before_the_calls_and_inside_of_a_block() -> None:
    program = hir.parse("""
host @inner on mesh(a=1) {
  input %x: f32[4] (a=R)
  %s: f32[] (a=R) = alloc
  block @F(%i) {
    %x.i: f32[2] of [4] (a=R, chunk(0,2,%i)) = chunk(%x)
    %y.i: f32[2] of [4] (a=R, chunk(0,2,%i)) = set(%x.i) contiguous
    for %j in 0..3 {
      %y.i = add(%y.i, %j)
    }
    %s.i: f32[] (a=R, chunk(P(sum),2,%i)) = sum(%y.i, dims=[0])
    %s = accumulate(%s.i)
  }
  call F(1)
  call F(0)
  return %s
}""")
    (s,) = mf.simulate(program, [torch.arange(4.0)]).outputs
    assert s == 6 + 4 * 3


def test_what_belongs_to_an_index() -> None:
    program = hir.parse(TWO_MESHES)
    assert per_index(program) == {"x.i", "h", "h_1", "c0", "y.i", "s.i"}
    f0, t01, f1 = (i for i in program if i.op == "block")
    first, second = program.meshes
    assert [mesh_of_block(program.types, i) for i in (f0, t01, f1)] == [first, None, second]
    assert [chunks_of(program, i) for i in (f0, t01, f1)] == [3, 3, 3]


def test_a_block_on_another_mesh_than_it_says_is_refused() -> None:
    with pytest.raises(mf.ProgramError, match="block F0 on m1") as error:
        hir.parse(TWO_MESHES.replace("@F0(%i) on m0", "@F0(%i) on m1"))
    assert "it is on m0" in str(error.value)
