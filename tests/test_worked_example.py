"""The worked example: sum on one device, scatter over four, double."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import TestCase

import mdfuse as mf
from mdfuse import DeviceMesh, Shard


def definition() -> mf.FusionDefinition:
    with mf.FusionDefinition("two_stages") as fd:
        x = fd.define_tensor([3, 4, 3, 5], torch.float32, DeviceMesh([0]), {})
        a = fd.ops.sum(x, dims=[3])
        b = fd.ops.set(a).on(DeviceMesh([0, 1, 2, 3]), {"x": Shard(1)})
        fd.add_output(b + b)
    return fd


def without_lines(program: object) -> str:
    """The text of a program without source lines, which move; a post takes two lines."""
    return re.sub(r" +# .*", "", str(program)).replace(" => ", "\n    => ")


class TestWorkedExample(TestCase):
    def test_fusion(self) -> None:
        self.assertExpectedInline(
            without_lines(definition()),
            """\
fusion @two_stages on mesh(x=1), mesh(x=4) {
  %x: f32[3,4,3,5] (x=R)! = input
  %a: f32[3,4,3] (x=R) = sum(%x, dims=[3])
  %b: f32[3,4,3] (x=S1)! = set(%a)
  %t: f32[3,4,3] (x=S1) = add(%b, %b)
  return %t
}""",
        )

    def test_global_program(self) -> None:
        self.assertExpectedInline(
            without_lines(mf.compile(definition())),
            """\
host @two_stages on m0=mesh(x=1), m1=mesh(x=4) {
  input %x: f32[3,4,3,5] m0(x=R)
  %a: f32[3,4,3] m0(x=R) = sum(%x, dims=[3]) order=[1,0,2]
  %b.send: f32[4,3,3] m0(x=R) = permute(%a, dims=[1,0,2])
  %b.recv: f32[1,3,3] of [4,3,3] m1(x=S0) = alloc
  %c0 = post scatter(%b.send) -> %b.recv f32[3,4,3] m0(x=R)
    => m1(x=S1) axis=x dim=1
  wait %c0
  free %b.send, %a
  %b: f32[3,1,3] of [3,4,3] m1(x=S1) = permute(%b.recv, dims=[1,0,2])
  free %b.recv
  %t: f32[3,1,3] of [3,4,3] m1(x=S1) = add(%b, %b) contiguous
  free %b
  return %t
}""",
        )

    def test_rank_0(self) -> None:
        self.assertExpectedInline(
            without_lines(mf.compile(definition()).for_rank(0)),
            """\
host @two_stages on m0=mesh(x=1), m1=mesh(x=4) rank 0 {
  input %x: f32[3,4,3,5] m0(x=R)
  %a: f32[3,4,3] m0(x=R) = sum(%x, dims=[3]) order=[1,0,2]
  %b.send: f32[4,3,3] m0(x=R) = permute(%a, dims=[1,0,2])
  %b.recv: f32[1,3,3] of [4,3,3] m1(x=S0) = alloc
  %c0 = post scatter(%b.send) -> %b.recv f32[3,4,3] m0(x=R)
    => m1(x=S1) axis=x dim=1 team=(0 1 2 3) root=0
  wait %c0
  free %b.send, %a
  %b: f32[3,1,3] of [3,4,3] m1(x=S1) = permute(%b.recv, dims=[1,0,2])
  free %b.recv
  %t: f32[3,1,3] of [3,4,3] m1(x=S1) = add(%b, %b) contiguous
  free %b
  return %t
}""",
        )

    def test_rank_2(self) -> None:
        self.assertExpectedInline(
            without_lines(mf.compile(definition()).for_rank(2)),
            """\
host @two_stages on m0=mesh(x=1), m1=mesh(x=4) rank 2 {
  input %x: f32 none of [3,4,3,5] m0(x=R)
  %b.recv: f32[1,3,3] of [4,3,3] m1(x=S0) = alloc
  %c0 = post scatter() -> %b.recv f32[3,4,3] m0(x=R)
    => m1(x=S1) axis=x dim=1 team=(0 1 2 3) root=0
  wait %c0
  %b: f32[3,1,3] of [3,4,3] m1(x=S1) = permute(%b.recv, dims=[1,0,2])
  free %b.recv
  %t: f32[3,1,3] of [3,4,3] m1(x=S1) = add(%b, %b) contiguous
  free %b
  return %t
}""",
        )


def test_other_ranks_run_the_same_without_the_first_two_lines() -> None:
    program = mf.compile(definition(), mf.Options(compile="never"))  # each op by itself

    def ops(rank: int) -> list[str]:
        return [i.op for i in program.for_rank(rank) if i.op != "free"]

    first = ops(0)
    assert first == ["reduce", "permute", "alloc", "post", "wait", "permute", "binary", "return"]
    for rank in (1, 2, 3):
        assert ops(rank) == first[2:]


def test_it_runs() -> None:
    x = torch.randn(3, 4, 3, 5)
    result = mf.simulate(mf.compile(definition()), [x], options=mf.Options(poison=True))
    want = 2 * x.sum(3)
    for rank, (got,) in enumerate(result.per_rank):
        assert torch.equal(got, want[:, rank : rank + 1])
        assert got.stride() == (3, 3, 1)
    assert torch.equal(result.outputs[0], want)


def test_one_communication() -> None:
    (scatter,) = mf.compile(definition()).communications
    assert (scatter.kind, scatter.reduce_op) == ("Scatter", None)
    assert [scatter.team(rank) for rank in range(4)] == [(0, 1, 2, 3)] * 4
    assert [scatter.root(rank) for rank in range(4)] == [0] * 4
    assert [scatter.bytes_received(rank) for rank in range(4)] == [0, 36, 36, 36]


@pytest.mark.parametrize("rank", [4, 17])
def test_a_rank_outside_runs_nothing(rank: int) -> None:
    assert [i.op for i in mf.compile(definition()).for_rank(rank)] == ["return"]
