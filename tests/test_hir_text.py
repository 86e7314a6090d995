"""Host programs as text: what is printed reads back, and what is no program is refused."""

from __future__ import annotations

import pytest
import torch
from two_stage import CASES, Case

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, hir

GRID = DeviceMesh([[3, 0, 5], [1, 4, 2]], axes=("dp", "tp"))


def check(program: mf.Program) -> None:
    """The global program and every projection of it read back equal, and print the same again."""
    ranks = range(program.host.last_rank + 2)
    for printed in (program.host, *map(program.for_rank, ranks)):
        text = str(printed)
        assert hir.parse(text) == printed
        assert str(hir.parse(text)) == without_comments(text)


def without_comments(text: str) -> str:
    return "\n".join(line.partition("#")[0].rstrip() for line in text.splitlines())


@pytest.mark.parametrize("case", CASES[::9], ids=str)
def test_two_stages(case: Case) -> None:
    check(case.program())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": Shard(0), "tp": Shard(1)}, {"dp": Shard(1), "tp": Shard(0)}),
        ({"dp": Shard(0), "tp": Shard(0)}, {"tp": Replicate()}),
        ({"dp": Partial("max"), "tp": Shard(2)}, {"dp": Shard(0), "tp": Shard(1)}),
        ({"tp": Shard(1)}, {"tp": Shard(0)}),
        ({}, {"tp": Partial()}),
    ],
)
def test_reshards(before: dict[str, mf.layout.Placement], after: dict[str, object]) -> None:
    with mf.FusionDefinition("reshard") as fd:
        x = fd.define_tensor([7, 5, 4], torch.bfloat16, GRID, before)
        fd.add_output(fd.ops.set(x).on(GRID, after))
    check(mf.compile(fd))


def test_every_kind_of_attribute() -> None:
    """Numbers, words, dtypes, lists, orders of axes, scalars, units, several meshes."""
    with mf.FusionDefinition("attributes") as fd:
        order = Layout(GRID, {"dp": Shard(0), "tp": Shard(0)}, {0: ("tp", "dp")})
        x = fd.define_tensor([12, 8], torch.float32, order)
        s = fd.define_scalar()
        y = fd.ops.gelu(x * (s + 1), approximate="tanh").to(torch.float16)
        y = fd.ops.where(y > 1e-9, y, float("inf"))
        y = fd.ops.dropout(fd.ops.softmax(y, dim=-1), 0.5, seed=7)
        z = fd.ops.set(y).on(DeviceMesh([7, 8]), {"x": Shard(1)})
        fd.add_output(fd.ops.max(z, dims=[0], keepdim=True))
        fd.add_output(y, stride_order=[0, 1])
    check(mf.compile(fd))


SMALL = """
host @double on mesh(x=2) {
  input %x: f32[2] of [4] (x=S0)
  %y: f32[2] of [4] (x=S0) = add(%x, %x)   # a comment
  return %y
}"""


def test_a_program_from_text_runs() -> None:
    program = hir.parse(SMALL)
    given = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0, 4.0])}]
    result = mf.simulate(program, per_rank=given)
    assert torch.equal(result.outputs[0], torch.tensor([2.0, 4.0, 6.0, 8.0]))


def test_lines_of_source_do_not_count() -> None:
    program = CASES[0].program().host
    assert any(i.source for i in program)
    assert not any(i.source for i in hir.parse(str(program)))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("add(%x, %x)", "add(%x, %x", "line 5"),
        ("add", "frobnicate", "there is no op 'frobnicate'"),
        ("f32[2]", "f31[2]", "there is no dtype f31"),
        ("return %y", "return %z", "return of undefined"),
        ("(x=S0) =", "m3(x=S0) =", "there is no mesh m3"),
    ],
)
def test_what_is_no_program(old: str, new: str, words: str) -> None:
    with pytest.raises(mf.ProgramError, match=words):
        hir.parse(SMALL.replace(old, new))
