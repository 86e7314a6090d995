"""Values in the memory of outputs: where they lie there, where not, and what is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled_suite

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Options, Shard, hir
from mdfuse.hir.passes import fill_outputs
from mdfuse.hir.verify.check import verify

#: A line of a plan that calls something, and what.
CALL = r" *(?:[\w, ]+ = )?(\w+)\("

ROWS, WIDTH, UNITS = 6, 8, 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of any size, not only of a megabyte and more."""
    monkeypatch.setattr(fill_outputs, "LEAST", 0)


def block(
    ops: Any, x: Any, w: Any, up: Any, down: Any, join: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """A transformer's second half: what is added to, and the result."""
    h = x + F.linear(x, w)
    n = F.rms_norm(h, [WIDTH], eps=1e-5)
    return h, h + join(F.linear(F.silu(F.linear(n, up)), down))


def defined(
    size: int = 1, reads: str = "", stride_order: list[int] | None = None, first: str = "input"
) -> FusionDefinition:
    mesh = DeviceMesh.arange(tp=size)
    with FusionDefinition("block") as fd:
        x = fd.define_tensor([ROWS, WIDTH], torch.float64, mesh, {}, name="x")
        w = fd.define_tensor([WIDTH, WIDTH], torch.float64, mesh, {}, name="w")
        up = fd.define_tensor([UNITS, WIDTH], torch.float64, mesh, {"tp": Shard(0)}, name="up")
        down = fd.define_tensor([WIDTH, UNITS], torch.float64, mesh, {"tp": Shard(1)}, name="down")
        before = x if first == "input" else x.T @ x
        h, y = block(fd.ops, before, w, up, down, lambda m: fd.ops.set(m).on(mesh, {}))
        fd.add_output(y, stride_order=stride_order)
        if reads:
            fd.add_output({"itself": h, "later": (y.sin() @ h.T), "part": h[:, :2] @ x[:2]}[reads])
    return fd


def compiled(fd: FusionDefinition, compile: str = "always") -> mf.Program:
    program = mf.compile(fd, Options(compile=compile))  # type: ignore[arg-type]
    verify(program.host)
    assert hir.parse(str(program.host)) == program.host
    return program


def made(program: mf.Program) -> list[str]:
    """What writes the first output, in order."""
    output = program.host.outputs[0]
    found = (i for i in program.host.walk() if output in i.outputs and i.op != "launch")
    return [i.fn or i.op for i in found]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("schedule", [None, 0])
@pytest.mark.parametrize("first", ["input", "made"])
def test_what_is_added_to_lies_where_the_sum_goes(
    size: int, schedule: int | None, first: str
) -> None:
    """The product, where all else that it is added to is an input; else the sum of both."""
    program = compiled(defined(size, first=first))
    assert made(program) == {"input": ["linear", "add"], "made": ["add", "add"]}[first]
    shapes = [program.fusion.values[n].shape for n in program.fusion.inputs]
    draw = torch.Generator().manual_seed(2)
    x, w, up, down = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    _, want = block(torch, x if first == "input" else x.T @ x, w, up, down, lambda m: m)
    for rank in mf.simulate(program, [x, w, up, down], schedule=schedule).per_rank:
        torch.testing.assert_close(rank[0], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reads", ["itself", "later", "part"])
def test_not_where_it_is_read_otherwise(reads: str) -> None:
    """As an output, behind the sum, or in parts."""
    assert made(compiled(defined(reads=reads))) == ["add"]


def test_not_without_launches() -> None:
    assert made(compiled(defined(), "never")) == ["add"]


def test_not_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ROWS * WIDTH * 8
    for least, found in ((size, ["linear", "add"]), (size + 1, ["add"])):
        monkeypatch.setattr(fill_outputs, "LEAST", least)
        mf.FusionCache.reset()
        assert made(compiled(defined())) == found


def test_not_where_a_kernel_would_be_cut() -> None:
    """Here one kernel computes all behind the product."""
    mesh = DeviceMesh.arange(tp=1)
    with FusionDefinition("pointwise") as fd:
        x, w = (fd.define_tensor([8, 8], mesh=mesh, layout={}) for _ in range(2))
        h = x @ w + 1.0
        fd.add_output(h + F.softmax(h, -1) * 2.0)
    assert made(compiled(fd)) == ["add"]


def test_not_where_the_most_is_held_before() -> None:
    mesh = DeviceMesh.arange(tp=1)
    with FusionDefinition("wide_before") as fd:
        x = fd.define_tensor([4, 8], mesh=mesh, layout={})
        wide, narrow = (fd.define_tensor(s, mesh=mesh, layout={}) for s in ([8, 64], [64, 8]))
        w = fd.define_tensor([8, 8], mesh=mesh, layout={})
        h = (x @ wide).exp() @ narrow + x
        fd.add_output(h + h @ w)
    assert made(compiled(fd)) == ["add"]


def test_not_in_the_last_of_equal_layers() -> None:
    """The others hold as much while the output is idle."""
    mesh = DeviceMesh.arange(tp=1)
    with FusionDefinition("stack") as fd:
        x = fd.define_tensor([ROWS, WIDTH], mesh=mesh, layout={})
        for _ in range(2):
            shapes = [WIDTH, WIDTH], [UNITS, WIDTH], [WIDTH, UNITS]
            weights = [fd.define_tensor(s, mesh=mesh, layout={}) for s in shapes]
            _, x = block(fd.ops, x, *weights, lambda m: m)
        fd.add_output(x)
    assert made(compiled(fd)) == ["add"]


@pytest.mark.usefixtures("unjoined")
def test_the_buffer_of_the_caller_is_filled() -> None:
    """Nothing else of its size is there beside the product that is added."""
    comm = mf.init(backend="null", size=1)
    with compiled_suite.launches():
        program = mf.compile(defined(), Options(compile="always"))
        shapes = [program.fusion.values[n].shape for n in program.fusion.inputs]
        draw = torch.Generator().manual_seed(3)
        given = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
        buffer = torch.full([ROWS, WIDTH], torch.nan, dtype=torch.float64)
        (got,) = program.run(*given, out=[buffer])
    comm.close()
    _, want = block(torch, *given, lambda m: m)
    assert got is buffer
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    lines = str(program.plans.recent).splitlines()
    calls = [found.group(1) for line in lines[1:] if (found := re.match(CALL, line))]
    assert calls == ["either", "f", "f_1"]


@pytest.mark.parametrize("stride_order", [None, [1, 0], [0, 1]])
def test_memory_orders_are_those_without_launches(stride_order: list[int] | None) -> None:
    found = []
    for compile in ("always", "never"):
        host = compiled(defined(stride_order=stride_order), compile).host
        found.append(host.orders[host.outputs[0]])
    assert found[0] == found[1] and found[0].stated is not None
