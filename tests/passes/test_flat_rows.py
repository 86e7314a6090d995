"""Heads that multiply rows of several dims do so as one dim, where losses read them so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

SMALL = mf.Options(logits_bytes=64, overlap="never")
MESH = DeviceMesh.arange(d=2)


def capped(lib: Any, x: Any) -> Any:
    return lib.tanh(x * 0.5) * 2.0


def plain(lib: Any, x: Any) -> Any:
    return x


def scaled(lib: Any, x: Any) -> Any:
    """Numbers of rows, and of classes, of which not all have the rows as dims."""
    return x * x[:, :, :1].detach() + x[:1, :1].detach()


def step(cap: Any, layout: Any, *, shown: bool = False) -> tuple[mf.FusionDefinition, list[Tensor]]:
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([4, 3, 5], torch.float64, MESH, layout)
        w = fd.define_tensor([7, 5], torch.float64, MESH)
        y = fd.define_tensor([4, 3], torch.int64, MESH, layout)
        logits = cap(mf.ops, mf.ops.linear(x, w))
        loss = mf.ops.cross_entropy(logits.flatten(0, 1), y.flatten())
        for out in (loss, *([logits] if shown else []), *mf.grad(loss, [x, w])):
            fd.add_output(out)
    g = torch.Generator().manual_seed(3)
    given = [torch.randn(*s, generator=g, dtype=torch.float64) for s in ((4, 3, 5), (7, 5))]
    return fd, [*given, torch.randint(7, (4, 3), generator=g)]


def expected(cap: Any, given: list[Tensor], *, shown: bool = False) -> list[Tensor]:
    x, w = (t.clone().requires_grad_() for t in given[:2])
    logits = cap(torch, x @ w.T)
    loss = F.cross_entropy(logits.flatten(0, 1), given[2].flatten())
    return [
        loss.detach(),
        *([logits.detach()] if shown else []),
        *torch.autograd.grad(loss, [x, w]),
    ]


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("cap", [plain, capped, scaled])
def test_rows_are_one_dim(cap: Any, dim: int | None) -> None:
    fd, given = step(cap, {} if dim is None else {"d": Shard(dim)})
    program = mf.compile(fd, SMALL)
    check_everywhere(program, given, expected(cap, given))
    at_once = mf.compile(fd, mf.Options(logits_bytes=0, overlap="never"))
    assert program.bytes_received(0) <= at_once.bytes_received(0)
    if cap is not scaled:
        products = [e for e in program.fusion.exprs if e.op in ("linear", "matmul")]
        dims = 3 if dim == 1 else 2  # one dim would lose a split of positions
        assert all(len(program.fusion.values[e.output].shape) == dims for e in products)
        assert any(i.op == "for" for i in program.host.walk())


@pytest.mark.parametrize("cap", [plain, capped])
def test_logits_that_are_returned_stay(cap: Any) -> None:
    fd, given = step(cap, {"d": Shard(0)}, shown=True)
    program = mf.compile(fd, SMALL)
    check_everywhere(program, given, expected(cap, given, shown=True))


def test_small_heads_stay() -> None:
    fd, _ = step(plain, {})
    assert str(mf.compile(fd)) == str(mf.compile(fd, mf.Options(logits_bytes=0)))


def test_shifted_rows() -> None:
    """A slice of positions stands between: rows of the batch are cut, where there are enough."""
    with mf.FusionDefinition("shifted") as fd:
        x = fd.define_tensor([4, 3, 5], torch.float64)
        w = fd.define_tensor([7, 5], torch.float64)
        y = fd.define_tensor([4, 3], torch.int64)
        logits = mf.ops.linear(x, w)[:, :-1]
        loss = mf.ops.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten())
        for out in (loss, *mf.grad(loss, [x, w])):
            fd.add_output(out)
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((4, 3, 5), (7, 5)))
    target = torch.randint(7, (4, 3), generator=g)
    c, d = a.clone().requires_grad_(), b.clone().requires_grad_()
    right = F.cross_entropy((c @ d.T)[:, :-1].flatten(0, 1), target[:, 1:].flatten())
    program = mf.compile(fd, mf.Options(logits_bytes=90))
    check_everywhere(program, [a, b, target], [right.detach(), *torch.autograd.grad(right, [c, d])])
    assert "in 4 chunks of rows" in program.explain()
