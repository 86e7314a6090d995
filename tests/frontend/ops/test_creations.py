"""Tensors made of numbers: each rank makes its own part, and nobody sends anything for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.oracle import is_close

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, Layout, Partial, Shard, Stream

LINE, PAIR, OTHER = DeviceMesh.arange(tp=4), DeviceMesh.arange(dp=2, tp=2), DeviceMesh([6, 5, 4])
MADE: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
    "full": (lambda ops: ops.full((5, 6), 1.5), torch.full((5, 6), 1.5)),
    "arange": (lambda ops: ops.arange(30.0).view(5, 6), torch.arange(30.0).view(5, 6)),
    "counted": (lambda ops: ops.arange(0.5, 5), torch.arange(0.5, 5)),
    "tensor": (
        lambda ops: ops.tensor([[r * 6.5 + c for c in range(6)] for r in range(5)]),
        torch.arange(5.0)[:, None] * 6.5 + torch.arange(6.0),
    ),
}
#: More ranks than rows: some hold nothing.
LAYOUTS = (
    Layout(LINE, {"tp": Shard(0)}),
    Layout(DeviceMesh.arange(tp=7), {"tp": Shard(0)}),
    Layout(PAIR, {"dp": Shard(0), "tp": Shard(0)}, order={0: ("tp", "dp")}),
    Layout(OTHER, {}),
    Layout(LINE, {"tp": Shard(0)}, stream=Stream(0, 3)),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MADE)
def test_every_rank_makes_its_own_part(name: str, layout: Layout) -> None:
    make, whole = MADE[name]
    with FusionDefinition(name) as fd:
        fd.add_output(fd.ops.set(make(fd.ops)).on(layout))
    program = mf.compile(fd)
    assert not program.communications, program
    assert mf.hir.parse(str(program.host)) == program.host
    assert is_close(mf.simulate(program, []).outputs[0], whole, exact=True), program


def test_what_several_layouts_and_meshes_read_is_made_in_each() -> None:
    with FusionDefinition("several") as fd:
        x = fd.define_tensor([5, 6], mesh=LINE, layout={"tp": Shard(0)})
        y = fd.define_tensor([5, 6], mesh=OTHER, layout={"x": Shard(1)})
        ramp = fd.ops.arange(6.0).on(PAIR, {"dp": Shard(0)})
        u = fd.ops.uniform((5, 6), seed=3)
        for result in (x * ramp + u, y * ramp + u, fd.ops.set(ramp).on(OTHER), ramp + 0):
            fd.add_output(result)
    program = mf.compile(fd)
    assert not program.communications, program
    inputs = [torch.randn(5, 6), torch.randn(5, 6)]
    found = mf.simulate(program, inputs).outputs
    drawn = found[0] - inputs[0] * torch.arange(6.0)
    ramp = torch.arange(6.0)
    for got, want in zip(found[1:], (inputs[1] * ramp + drawn, ramp, ramp), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["S0", "partial"])
def test_like_another_is_one_instruction_that_reads_nothing(kind: str) -> None:
    layout = {"tp": Shard(0)} if kind == "S0" else {"tp": Partial()}
    with FusionDefinition("like") as fd:
        x = fd.define_tensor([5, 4], torch.bfloat16, mesh=LINE, layout=layout, name="x")
        fd.add_output(torch.full_like(x, 0.1))
    program = mf.compile(fd)
    assert not program.communications, program
    made = [i for i in program.host.walk() if i.op not in ("free", "return")]
    assert [i.op for i in made] == ["full"] and "x" not in made[0].reads, program
    (result,) = mf.simulate(program, [torch.zeros(5, 4, dtype=torch.bfloat16)]).outputs
    assert torch.equal(result, torch.full((5, 4), 0.1, dtype=torch.bfloat16))
    if kind == "S0":
        assert program.host.types[made[0].outputs[0]].layout == Layout(LINE, {"tp": Shard(0)})


def test_extents_that_each_run_chooses() -> None:
    with FusionDefinition("symbolic") as fd:
        x = fd.define_tensor([-1, 4], mesh=LINE, layout={"tp": Shard(0)})
        n = x.shape[0]
        fd.add_output(x * fd.ops.arange(n)[:, None] + fd.ops.ones(n, 4))
        fd.add_output(torch.zeros_like(x) + x.new_full((n, 1), 2))
    program = mf.compile(fd)
    for rows in (3, 8):
        x = torch.randn(rows, 4)
        found = mf.simulate(program, [x]).outputs
        torch.testing.assert_close(found[0], x * torch.arange(rows)[:, None] + 1)
        torch.testing.assert_close(found[1], torch.full((rows, 4), 2.0))


def test_a_number_of_each_run_fills() -> None:
    with FusionDefinition("filled") as fd:
        s = fd.define_scalar(name="s")
        fd.add_output(fd.ops.full((5,), s, mesh=LINE, layout={"tp": Shard(0)}))
    found = mf.simulate(mf.compile(fd), [2.5]).outputs[0]
    assert torch.equal(found, torch.full((5,), 2.5))


WRONG: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "a tensor fills": (lambda ops, x: ops.full((2,), x), ("full with %x", "expand")),
    "too large": (lambda ops, x: ops.full((2,), 300, dtype=torch.uint8), ("300", "uint8")),
    "no shape": (lambda ops, x: ops.zeros("ab"), ("shape = 'ab'",)),
    "negative and empty": (lambda ops, x: ops.zeros(-2, 0), ("(-2, 0)",)),
    "a sparse mesh": (lambda ops, x: ops.zeros(2, mesh=torch.eye(2).to_sparse()), ("mesh",)),
    "negative": (lambda ops, x: ops.zeros(-2), ("(-2,)",)),
    "nested shape": (lambda ops, x: ops.ones([[2], 3]), ("[[2], 3]",)),
    "no step": (lambda ops, x: ops.arange(1, 5, 0), ("arange(1, 5, 0)", "sign")),
    "wrong way": (lambda ops, x: ops.arange(5, 1), ("arange(5, 1, 1)",)),
    "endless": (lambda ops, x: ops.arange(float("inf")), ("inf",)),
    "large constant": (lambda ops, x: ops.tensor(torch.ones(5000)), ("5000", "define_tensor")),
    "ragged": (lambda ops, x: ops.tensor([[1], [1, 2]]), ("torch says",)),
    "sparse": (lambda ops, x: ops.tensor(torch.ones(2).to_sparse()), ("dense",)),
    "nested": (
        lambda ops, x: ops.tensor(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])),
        ("dense",),
    ),
    "trained": (lambda ops, x: ops.tensor(torch.nn.Parameter(torch.ones(2))), ("trains",)),
    "complex": (lambda ops, x: ops.tensor(1j), ("real",)),
    "of a handle": (lambda ops, x: ops.tensor([x]), ("constant",)),
    "no mesh": (lambda ops, x: ops.zeros(2, layout={"tp": Shard(0)}), ("mesh",)),
    "mesh of words": (lambda ops, x: ops.zeros(2, mesh="abc"), ("abc",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    wrong, says = WRONG[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 4], name="x")
        with pytest.raises(mf.MdfuseError) as caught:
            wrong(fd.ops, x)
    for words in says:
        assert words in str(caught.value), caught.value


def test_without_a_definition() -> None:
    with pytest.raises(DefinitionError, match="needs a definition"):
        mf.ops.zeros(2)
