"""Rows of several dims stay so, where rows as one dim would be gathered."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

MESH = DeviceMesh.arange(dp=2, cp=3)
SPLIT = {"dp": Shard(0), "cp": Shard(1)}
ROWS, CLASSES = (4, 6), 24

Loss = Callable[[Any, Any, Any], Any]


def cross_entropy(lib: Any, logits: Any, ids: Any) -> Any:
    return lib.cross_entropy(logits.reshape(-1, CLASSES), ids.reshape(-1))


def by_hand(lib: Any, logits: Any, ids: Any) -> Any:
    """Views, an expansion, means of rows, and of rows with classes."""
    flat = logits.reshape(-1, CLASSES)
    top = flat.sum(1).unsqueeze(1).expand(flat.shape) * 0.01
    each = (lib.log_softmax(flat - top, -1) * flat.exp()).mean(-1)
    return (each * ids.reshape(-1)).sum() + flat.sin().mean() + (flat * each[:, None]).sum()


def with_classes(lib: Any, logits: Any, ids: Any) -> Any:
    """There are as many classes as rows: numbers of rows stand beside classes, too."""
    flat = logits.reshape(-1, CLASSES)
    each = flat.square().sum(1)
    return (flat * each).sum() + (flat + each.unsqueeze(1)).cos().sum()


def by_products(lib: Any, logits: Any, ids: Any) -> Any:
    """A product of rows, and one over rows, which reads them as one dim."""
    flat = logits.reshape(-1, CLASSES)
    return ((flat @ flat.t()[:, :5]).tanh() + ids.reshape(-1, 1)).sum()


def step(loss: Loss, dtype: torch.dtype = torch.float64) -> mf.FusionDefinition:
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([*ROWS, 5], dtype, MESH, SPLIT, name="x")
        w = fd.define_tensor([CLASSES, 5], dtype, MESH, name="w")
        ids = fd.define_tensor(ROWS, torch.int64, MESH, SPLIT, name="ids")
        total = loss(mf.ops, mf.ops.linear(x, w), ids)
        for value in (total, *mf.grad(total, [x, w])):
            fd.add_output(value)
    return fd


def checked(loss: Loss, options: mf.Options | None = None) -> mf.Program:
    """The program, after its values were compared with torch's on whole tensors."""
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((*ROWS, 5), (CLASSES, 5))
    )
    ids: Tensor = torch.randint(CLASSES, ROWS, generator=generator)
    total = loss(_Torch(), functional.linear(x, w), ids)
    want = [total.detach(), *torch.autograd.grad(total, [x, w])]
    program = mf.compile(step(loss), options)
    given = [x.detach(), w.detach(), ids]
    got = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
    return program


class _Torch:
    """The functions of torch that losses call."""

    cross_entropy = staticmethod(functional.cross_entropy)
    log_softmax = staticmethod(functional.log_softmax)


@pytest.mark.parametrize("most", [0, 64, 2**28])
@pytest.mark.parametrize("loss", [cross_entropy, by_hand], ids=lambda f: f.__name__)
def test_losses_of_rows_send_numbers_alone(loss: Loss, most: int) -> None:
    """The gradient of the matrix is added up; no rank lacks any row."""
    program = checked(loss, mf.Options(logits_bytes=most))
    shapes = [c.shape for c in program.communications if c.shape != (CLASSES, 5)]
    assert all(math.prod(shape) == 1 for shape in shapes), program


@pytest.mark.parametrize("loss", [with_classes, by_products], ids=lambda f: f.__name__)
def test_other_readers_of_rows_see_them_as_one_dim(loss: Loss) -> None:
    checked(loss)


def test_rows_that_no_view_gathers_stay_one_dim() -> None:
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([*ROWS, 5], torch.float64, MESH, {"dp": Shard(0)})
        y = x.reshape(-1, 5).exp()
        fd.add_output(y.sum(0))
    assert mf.compile(fd).fusion.values[y.name].shape == (24, 5)


@pytest.mark.parametrize("keepdim", [False, True])
def test_a_sum_of_rows_that_keeps_their_dim(keepdim: bool) -> None:
    """Rows are compared with their largest, so two numbers travel, and no row."""
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor(ROWS, torch.float64, MESH, SPLIT)
        fd.add_output(mf.ops.logsumexp(x.reshape(-1).tanh(), 0, keepdim=keepdim))
    program = mf.compile(fd)
    given = torch.randn(ROWS, dtype=torch.float64)
    got = mf.simulate(program, [given], options=mf.Options(poison=True)).outputs[0]
    torch.testing.assert_close(got, given.reshape(-1).tanh().logsumexp(0, keepdim=keepdim))
    assert [math.prod(c.shape) for c in program.communications] == [1, 1], program


def test_rows_that_two_readers_need_whole_come_together_once() -> None:
    """One is an output, one reads rows as one dim: each would send what it reads of two dims."""
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor(ROWS, torch.float64, MESH, SPLIT)
        y = x.reshape(-1).tanh()
        fd.add_output(y.exp())
        fd.add_output(y.sin().cumsum(0))
    program = mf.compile(fd)
    given = torch.randn(ROWS, dtype=torch.float64)
    got = mf.simulate(program, [given], options=mf.Options(poison=True)).outputs
    want = given.reshape(-1).tanh()
    torch.testing.assert_close(got, (want.exp(), want.sin().cumsum(0)))
    sent = [c.shape for c in program.communications]
    assert sent == [ROWS, (2, 1)], program  # of each half, its last sum travels, too


def test_a_view_of_rows_that_a_second_one_makes_again() -> None:
    """The first makes [6,1] of [6,1,1]; the second makes the same two dims one."""
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([6, 1, 5], torch.float64, MESH, {"cp": Shard(1)})
        y = x.exp().sum(2, keepdim=True).reshape(6, 1).reshape(6)
        fd.add_output((y + 1.0).sum())
    given = torch.randn(6, 1, 5, dtype=torch.float64)
    got = mf.simulate(mf.compile(fd), [given], options=mf.Options(poison=True)).outputs
    torch.testing.assert_close(got[0], (given.exp().sum(2) + 1.0).sum())
