"""The backward of compiled programs computes element-wise values again that follow from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.seeing.backward_memory import backward_memory

ONE, LINE = DeviceMesh.arange(one=1), DeviceMesh.arange(d=3)
ALWAYS = mf.Options(compile="always", poison=True, overlap="never")

Net = Callable[[Any, Any, Any, Any], Any]


def _gated(lib: Any, x: Any, w: Any, v: Any) -> Any:
    """The gate and the other factor are kept, not the activation, nor the product."""
    return lib.linear(lib.silu(lib.linear(x, w)) * lib.linear(x, v), w.T)


def _views(lib: Any, x: Any, w: Any, v: Any) -> Any:
    """The product reads a view of what is computed again."""
    h = lib.linear(x, w) * lib.linear(x, v)
    return lib.linear(lib.tanh(h).reshape(-1, w.shape[0]), w.T)


def _of_input(lib: Any, x: Any, w: Any, v: Any) -> Any:
    return lib.linear(lib.sigmoid(x + 1.0), w) * lib.linear(x, v)


def _nothing(lib: Any, x: Any, w: Any, v: Any) -> Any:
    """The gradient of relu reads its result alone, so the backward would keep more."""
    return lib.linear(lib.relu(lib.linear(x, w)), w.T) * lib.linear(x, v).sum()


NETS: dict[str, Net] = {"gated": _gated, "views": _views, "input": _of_input, "none": _nothing}


class _Torch:
    linear, silu, relu = F.linear, F.silu, F.relu
    tanh, sigmoid = torch.tanh, torch.sigmoid


def define(net: Net, mesh: DeviceMesh, rows: int, keeps: bool = False) -> mf.FusionDefinition:
    split = {"d": Shard(0)} if mesh is LINE else {}
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([rows, 4], torch.float64, mesh, split)
        w, v = (fd.define_tensor([6, 4], torch.float64, mesh) for _ in range(2))
        y = net(mf.ops, x, w, v)
        fd.add_output(y)
        for g in mf.grad((y * y).sum(), [x, w, v]):
            fd.add_output(g)
    return fd


def by_torch(net: Net, given: list[Tensor]) -> list[Tensor]:
    x, w, v = (t.clone().requires_grad_() for t in given)
    y = net(_Torch, x, w, v)
    return [y.detach(), *torch.autograd.grad((y * y).sum(), [x, w, v])]


def again(program: mf.Program) -> list[str]:
    return [x for e in program.fusion.exprs for x in e.outputs if x.endswith(".again")]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("mesh", [ONE, LINE], ids=["one", "line"])
@pytest.mark.parametrize("rows", [7, 1])
def test_values(name: str, mesh: DeviceMesh, rows: int) -> None:
    """On even and uneven parts, and where a rank has no row; with equal and infinite elements."""
    program = mf.compile(define(NETS[name], mesh, rows), ALWAYS)
    g = torch.Generator().manual_seed(rows)
    given = [torch.randn(*s, generator=g, dtype=torch.float64) for s in ((rows, 4), (6, 4), (6, 4))]
    check_everywhere(program, given, by_torch(NETS[name], given))
    given[0][0] = 0.0
    given[1][2] = given[2][2] = 1.0
    check_everywhere(program, given, by_torch(NETS[name], given))
    assert bool(again(program)) == (name != "none"), f"{program}"


def test_neither_activation_nor_product_is_kept() -> None:
    fd = define(_gated, ONE, 5)
    usual = backward_memory(mf.compile(fd, mf.Options(compile="never")).fusion, 0)
    fewer = mf.compile(fd, ALWAYS)
    kept = backward_memory(fewer.fusion, 0)
    assert sum(usual.held.values()) - sum(kept.held.values()) == 2 * 5 * 6 * 8, f"{fewer}"
    assert kept.operations == 0 and len(kept.again) == 2
    assert "2 values, 480 B, are computed again" in fewer.explain(), fewer.explain()
    forward = {"silu", "mul"}
    units = [i for i in fewer.host.walk() if i.op == "launch"]
    made = [{j.fn for j in i.body} & forward for i in units if forward & {j.fn for j in i.body}]
    assert len(made) >= 2, f"{fewer}"  # forward and backward are no unit together


def test_programs_that_are_not_compiled_keep_all() -> None:
    program = mf.compile(define(_gated, ONE, 5), mf.Options(compile="never"))
    assert not again(program), f"{program}"


def test_what_a_caller_gets_is_not_computed_again() -> None:
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([5, 4], torch.float64, ONE)
        w = fd.define_tensor([4, 4], torch.float64, ONE)
        h = mf.ops.silu(x)
        fd.add_output(h)
        fd.add_output(mf.grad(mf.ops.linear(h, w).sum(), [w])[0])
    program = mf.compile(fd, ALWAYS)
    assert not again(program), f"{program}"
