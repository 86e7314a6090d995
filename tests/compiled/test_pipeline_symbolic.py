"""Pipelines of definitions whose extents each run chooses: rows of the batch, and lengths."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, hir

FIRST, SECOND = DeviceMesh([0]), DeviceMesh([1])
D = torch.float64


def define(rows: int, length: int, last: DeviceMesh) -> mf.FusionDefinition:
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([rows, length, 4], D, FIRST, name="x")
        w, v = (fd.define_tensor([4, 4], D, m, name=n) for m, n in ((FIRST, "w"), (last, "v")))
        t = fd.define_tensor([x.shape[0], x.shape[1], 4], D, last, name="t")
        h = fd.ops.set(fd.ops.linear(x, w).tanh()).on(last, {})
        loss = fd.ops.mse_loss(fd.ops.linear(h, v), t)
        for y in (loss, *mf.grad(loss, [w, v])):
            fd.add_output(y)
    return fd


def pipeline(last: DeviceMesh, rows: int = -1, length: int = -1) -> mf.Program:
    return mf.pipeline(define(rows, length, last), microbatches=2, batch={"x": 0, "t": 0})


def drawn(rows: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs, and what torch makes of them."""
    x, w, v, t = (
        torch.randn(s, dtype=D) for s in ([rows, length, 4], [4, 4], [4, 4], [rows, length, 4])
    )
    leaves = [w.requires_grad_(), v.requires_grad_()]
    loss = F.mse_loss(F.linear(F.linear(x, w).tanh(), v), t)
    wanted = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    return [x, w.detach(), v.detach(), t], wanted


@pytest.mark.parametrize("last", [FIRST, SECOND], ids=["loop", "stages"])
def test_one_lowering_serves_batches_of_all_even_lengths(last: DeviceMesh) -> None:
    program = pipeline(last)
    for rows, length in ((8, 3), (2, 5), (6, 2), (4, 7)):
        given, wanted = drawn(rows, length)
        found = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert len(program.lowerings) == 1
    assert hir.parse(str(program.host_for({"x.0": 4, "x.1": 7}))).inputs == program.host.inputs


@pytest.mark.parametrize("last", [FIRST, SECOND], ids=["loop", "stages"])
@pytest.mark.parametrize("rows", [2, 6])
def test_it_is_the_program_of_the_numbers(rows: int, last: DeviceMesh) -> None:
    def text(program: Any) -> str:
        return re.sub(r" +#.*", "", str(program))

    found = pipeline(last).host_for({"x.0": rows, "x.1": 3})
    assert text(found) == text(pipeline(last, rows, 3).host)


def test_rows_that_microbatches_do_not_divide_are_refused_by_their_number() -> None:
    """A linear layer makes one dim of rows and positions, where their chunks must fall together."""
    with pytest.raises(mf.LoweringError, match=r"for the extents \{'x.0': 3, 'x.1': 2\}"):
        pipeline(SECOND).host_for({"x.0": 3, "x.1": 2})


def test_with_extents_it_still_has_its_schedule() -> None:
    program = pipeline(SECOND)
    assert program.schedule is not None
    told = program.with_extents({"x.0": 8, "x.1": 2})
    assert told.schedule == program.schedule
    assert "1f1b on m0: stage 0" in told.explain()


@pytest.mark.parametrize("last", [FIRST, SECOND], ids=["loop", "stages"])
def test_a_run_of_one_row(last: DeviceMesh) -> None:
    """Its row may be brought together, as rows of a batch may not."""
    with mf.FusionDefinition("positions") as fd:
        x = fd.define_tensor([-1, 3, 4], D, FIRST, name="x")
        w = fd.define_tensor([5, 4], D, FIRST, name="w")
        h = fd.ops.set(x + w[:3].unsqueeze(0)).on(last, {})
        loss = h.square().sum()
        for y in (loss, *mf.grad(loss, [w]), h.amax(0)):
            fd.add_output(y)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0})
    for rows in (1, 4, 1):
        given, w = torch.randn(rows, 3, 4, dtype=D), torch.randn(5, 4, dtype=D, requires_grad=True)
        h = given + w[:3]
        loss = h.square().sum()
        wanted = loss, *torch.autograd.grad(loss, [w]), h.amax(0)
        found = mf.simulate(program, [given, w.detach()]).outputs
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want.detach())
