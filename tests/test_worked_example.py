"""The worked example: sum on one device, scatter over four, double."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.golden import Golden

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


def test_fusion(golden: Golden) -> None:
    golden(without_lines(definition()))


def test_global_program(golden: Golden) -> None:
    golden(without_lines(mf.compile(definition())))


def test_rank_0(golden: Golden) -> None:
    golden(without_lines(mf.compile(definition()).for_rank(0)))


def test_rank_2(golden: Golden) -> None:
    golden(without_lines(mf.compile(definition()).for_rank(2)))


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
