"""Large values live shorter: the peak of a gated layer's backward by hand, and its values."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled_suite, sampling
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.instructions import is_elementwise
from mdfuse.hir.passes import large_values
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify.check import verify
from mdfuse.ir import groups
from mdfuse.seeing.memory_use import memory_of

MESH, SPLIT = DeviceMesh.arange(cp=2), {"cp": Shard(0, zigzag=True)}
ROWS, WIDE, UNITS, ITEM = 256, 4, 512, 8

#: The bytes of a rank: a value of the units, one of the layer, and a weight.
UNIT, VALUE, WEIGHT = ROWS // 2 * UNITS * ITEM, ROWS // 2 * WIDE * ITEM, UNITS * WIDE * ITEM


def gated(name: str) -> mf.Program:
    with mf.FusionDefinition(name) as fd:
        x, seed = (fd.define_tensor([ROWS, WIDE], torch.float64, MESH, SPLIT) for _ in range(2))
        g, u = (fd.define_tensor([UNITS, WIDE], torch.float64, MESH) for _ in range(2))
        d = fd.define_tensor([WIDE, UNITS], torch.float64, MESH)
        y = F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)
        grads = mf.grad(y, [x, g, u, d], seed=seed)
        for value, layout in [(y, SPLIT), (grads[0], SPLIT), *((w, {}) for w in grads[1:])]:
            fd.add_output(fd.ops.set(value).on(MESH, layout))
    return mf.compile(fd, mf.Options(compile="always", overlap="never"))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> mf.Program:
    """The layer where a value of the units is large, and nothing else is."""
    monkeypatch.setattr(large_values, "LEAST", UNIT)
    program = gated("gated")
    verify(program.host)
    return program


def given() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDE)] * 2 + [(UNITS, WIDE)] * 2 + [(WIDE, UNITS)]
    return [torch.randn(s, dtype=torch.float64, generator=g) for s in shapes]


def test_values_are_those_of_torch(program: mf.Program) -> None:
    x, seed, g, u, d = given()
    leaves = [t.clone().requires_grad_() for t in (x, g, u, d)]
    y = F.linear(F.silu(F.linear(leaves[0], leaves[1])) * F.linear(leaves[0], leaves[2]), leaves[3])
    wanted = [y.detach(), *torch.autograd.grad(y, leaves, seed)]
    got = mf.simulate(program, [x, seed, g, u, d]).outputs
    torch.testing.assert_close([*got], wanted, rtol=1e-10, atol=1e-10)


def test_three_values_of_the_units_are_handed_on(program: mf.Program) -> None:
    """Between instructions: gate, other factor, and the gradient of their product."""
    held = memory_of(program.for_rank(0))
    small = 4 * VALUE + 9 * WEIGHT  # in and out; weights, their gradients, and terms of these
    assert 3 * UNIT < max(held.bytes) <= 3 * UNIT + small
    assert small < UNIT


def test_a_run_holds_no_more_than_the_program_says(program: mf.Program) -> None:
    """The simulator runs units one by one: two values that kernels do not write are beside."""
    peak = max(mf.simulate(program, given()).peak_bytes)
    assert 5 * UNIT < peak <= 5 * UNIT + 4 * VALUE + 9 * WEIGHT


def test_each_product_is_computed_once(program: mf.Program) -> None:
    assert products(program.host) == 9  # three forward, six backward


def test_less_than_before(program: mf.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_values, "LEAST", UNIT + 1)
    before = gated("before")  # of another name: equal definitions are lowered once
    peaks = [max(memory_of(p.for_rank(0)).bytes) for p in (before, program)]
    assert peaks[0] >= 5 * UNIT > peaks[1] + UNIT
    assert products(before.host) == products(program.host)


def test_a_unit_of_elements_writes_over_what_dies(program: mf.Program) -> None:
    units = [i for i in program.host.instructions if i.op == "launch"]
    over = [i for i in units if {*i.outputs} <= {*i.reads}]
    assert [len(i.outputs) for i in over] == [2]
    assert all(map(is_elementwise, over[0].body))


def products(host: HostProgram) -> int:
    return sum(i.fn in ("matmul", "linear") for i in host.walk())


# -- rows that are counted -------------------------------------------------------------------------


def experts(draw: random.Random, counts: Literal["host", "device"]) -> tuple[mf.Program, Any]:
    """A gated product of each expert, whose rows a run counts, with a bias or none; gradients."""
    ep, t, e = draw.choice((1, 2, 3)), draw.choice((1, 6, 8)), draw.choice((2, 3, 5))
    mesh, d, h = DeviceMesh.arange(dp=2, ep=ep), draw.choice((2, 4)), draw.choice((3, 5))
    split, there = {a: Shard(0) for a in ("dp", "ep")}, {"dp": Shard(0), "ep": Shard(1)}
    g = torch.Generator().manual_seed(t)
    ids = torch.rand(t, e, generator=g).topk(draw.choice((1, 2)), -1).indices
    shapes = [(t, d), *[(e, d, h)] * 2, (e, 1, h), (e, h, d)]
    values = [torch.randn(s, dtype=torch.float64, generator=g) for s in shapes]
    is_smooth, has_bias = draw.random() < 0.5, draw.random() < 0.5

    def units(a: Any, u: Any) -> Any:
        return F.silu(a).sigmoid() * u if is_smooth else F.silu(a) * u

    with mf.FusionDefinition("experts") as fd:
        x = fd.define_tensor((t, d), torch.float64, mesh, split)
        places = fd.define_tensor([*ids.shape], torch.int64, mesh, split)
        layout = {"ep": Shard(0)}
        up, gate, bias, down = (
            fd.define_tensor(s, torch.float64, mesh, layout) for s in shapes[1:]
        )
        n = fd.ops.counts(places, experts=e, parts=mesh.size)
        rows = fd.ops.set(fd.ops.group_rows(x, places, n)).on(mesh, there)
        a = fd.ops.grouped_mm(rows, up) + bias if has_bias else fd.ops.grouped_mm(rows, up)
        y = fd.ops.grouped_mm(units(a, fd.ops.grouped_mm(rows, gate)), down)
        y = fd.ops.ungroup_rows(fd.ops.set(y).on(mesh, split), places)
        for result in (y, *mf.grad((y * y).sum(), [x, up, gate, down])):
            fd.add_output(result)
    leaves = [v.clone().requires_grad_() for v in values]
    x, up, gate, bias, down = leaves
    of = ids.T.flatten()
    each = x.repeat(ids.shape[1], 1).unsqueeze(1)
    a = each @ up[of] + bias[of] * has_bias
    y = (units(a, each @ gate[of]) @ down[of]).view(*ids.T.shape, d).sum(0)
    slopes = torch.autograd.grad((y * y).sum(), [x, up, gate, down])
    program = mf.compile(fd, mf.Options(counts=counts, compile="always"))
    return program, ([values[0], ids, *values[1:]], [y.detach(), *slopes])


@pytest.mark.parametrize("counts", ["host", "device"])
@pytest.mark.parametrize("seed", sampling.window(24, 12))
def test_units_write_over_no_rows_of_unknown_strides(
    monkeypatch: pytest.MonkeyPatch, seed: int, counts: Literal["host", "device"]
) -> None:
    refused = compiled_suite.REFUSED.copy()
    monkeypatch.setattr(groups, "may_look", lambda _: False)
    with compiled_suite.launches(), monkeypatch.context() as patch:
        patch.setattr(large_values, "LEAST", 1)
        program, (inputs, wanted) = experts(random.Random(seed), counts)
        verify(program.host)
        check_everywhere(program, inputs, wanted, schedule=seed)
    assert refused == compiled_suite.REFUSED
