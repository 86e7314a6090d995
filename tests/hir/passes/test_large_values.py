"""Large values live shorter: the peak of a gated layer's backward by hand, and its values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.instructions import is_elementwise
from mdfuse.hir.passes import large_values
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify.check import verify
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
