"""Sums of narrow floats are reduced in a wider dtype, wherever they are reduced."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.drawn import drawn
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, Stream

MESH = DeviceMesh.arange(tp=4)
GRID = DeviceMesh.arange(dp=2, tp=2)
WIDE = mf.Options(reduce_dtype=torch.float32)
PLAIN = mf.Options()
F = torch.nn.functional


def reduced(program: mf.Program) -> dict[str, set[str]]:
    """Reduce op -> the dtypes in which it is posted."""
    found: dict[str, set[str]] = {}
    for i in program.host.walk():
        if i.comm is not None and i.comm.reduce_op is not None:
            found.setdefault(i.comm.reduce_op, set()).add(str(program.host.types[i.reads[0]].dtype))
    return found


def definition(dtype: torch.dtype = torch.bfloat16) -> mf.FusionDefinition:
    """A row-parallel product on a grid, its gradients, a law, a max: many reductions."""
    with mf.FusionDefinition("narrow") as fd:
        x = fd.define_tensor([8, 16], dtype, GRID, {"dp": Shard(0), "tp": Shard(1)})
        w = fd.define_tensor([16, 12], dtype, GRID, {"tp": Shard(0), "dp": Shard(1)})
        b = fd.define_tensor([12], dtype, GRID, {})
        whole = fd.ops.set(w).on(GRID, {"tp": Shard(0)})
        y = x @ whole + b
        top = fd.ops.set(y.amax(0)).on(GRID, {})
        for out in (y, top, *mf.grad(fd.ops.tanh(y).mean(), [x, w, b])):
            fd.add_output(out)
    return fd


def test_every_reduction_of_a_sum_is_wide() -> None:
    plain, wide = mf.compile(definition()), mf.compile(definition(), WIDE)
    # The gradient of the bias is a sum, which is wide in any case; the others are products.
    both = {"torch.bfloat16", "torch.float32"}
    assert reduced(plain) == {"sum": both, "max": {"torch.bfloat16"}}
    assert reduced(wide) == {"sum": {"torch.float32"}, "max": {"torch.bfloat16"}}
    for name in plain.fusion.outputs:
        assert wide.fusion.values[name].dtype == torch.bfloat16
        assert wide.fusion.layout(name) == plain.fusion.layout(name)
    parsed = str(mf.hir.parse(str(wide.host)))
    assert parsed == re.sub(" +# test_.*", "", str(wide.host))
    assert str(mf.hir.parse(parsed)) == parsed


def test_nothing_changes_for_wide_floats() -> None:
    plain = mf.compile(definition(torch.float32), PLAIN)
    assert str(mf.compile(definition(torch.float32), WIDE)) == str(plain)


def test_in_f64() -> None:
    program = mf.compile(definition(torch.float32), mf.Options(reduce_dtype=torch.float64))
    assert reduced(program)["sum"] == {"torch.float64"}


def test_the_values_are_those_of_one_device() -> None:
    fd = definition()
    inputs = [drawn(8, 16), drawn(16, 12, seed=1), drawn(12, seed=2)]
    given = [x.to(torch.bfloat16) for x in inputs]
    x, w, b = leaves = [x.double().requires_grad_() for x in given]
    y = x @ w + b
    grads = torch.autograd.grad(y.tanh().mean(), leaves)
    expected = [t.detach().to(torch.bfloat16) for t in (y, y.amax(0), *grads)]
    check_everywhere(mf.compile(fd, WIDE), given, expected)


#: Parts of which bf16 loses all but the first: 256 and 1, 1, 1.
PARTS = torch.tensor([[256.0], [1.0], [1.0], [1.0]])


@pytest.mark.parametrize(
    "to",
    [
        Layout(MESH, {"tp": Replicate()}),
        Layout(MESH, {"tp": Shard(0)}),
        Layout(DeviceMesh([1, 2], ["tp"]), {}),
        Layout(DeviceMesh([5, 4], ["tp"]), {"tp": Shard(0)}),
        Layout(MESH, {}, stream=Stream(0, 2)),
        Layout(MESH, {"tp": Shard(0)}, stream=Stream(0, 2)),
    ],
    ids=str,
)
def test_sums_are_rounded_once(to: Layout) -> None:
    """Whatever moves the parts: bf16 alone would give 256, since 256 + 1 is rounded to it."""
    with mf.FusionDefinition("sum") as fd:
        x = fd.define_tensor([4, 8], torch.bfloat16, MESH, {"tp": Partial()})
        fd.add_output(fd.ops.set(x).on(to))
    parts = [{"x": p.expand(4, 8).to(torch.bfloat16).clone()} for p in PARTS]
    parts += [{} for _ in range(4, 1 + max(3, *to.mesh.ranks))]
    wide = mf.simulate(mf.compile(fd, WIDE), per_rank=parts).outputs[0]
    assert torch.equal(wide, torch.full((4, 8), 259.0).to(torch.bfloat16))
    assert wide[0, 0] == 260.0


@pytest.mark.parametrize("op", ["max", "min", "avg", "prod"])
def test_other_ops_are_left_alone(op: Any) -> None:
    with mf.FusionDefinition("other") as fd:
        x = fd.define_tensor([4, 8], torch.bfloat16, MESH, {"tp": Partial(op)})
        fd.add_output(fd.ops.set(x).on(MESH, {}))
    assert str(mf.compile(fd, WIDE)) == str(mf.compile(fd, PLAIN))


@pytest.mark.parametrize("wrong", [torch.int32, torch.bfloat16, "torch.float32", 32, float])
def test_wrong_dtypes(wrong: Any) -> None:
    with pytest.raises(mf.ProgramError, match=re.escape("reduce_dtype=")) as error:
        mf.Options(reduce_dtype=wrong)
    assert error.value.because is not None
    assert "torch.float32" in error.value.because
