"""Attention's sums and its gradient by the kernels of GPUs, against plain torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ir.test_attention import CASES, drawn, plain

import mdfuse as mf
from mdfuse.ir.attention import attend, attend_grad

pytestmark = [pytest.mark.world(2), pytest.mark.gpu]


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str, dtype: torch.dtype, has_mask: bool, comm: mf.Communicator) -> None:
    """Kernels of two kinds, or blocks where torch has none for such operands."""
    *shapes, how = CASES[name]
    has_mask = has_mask and not how.get("is_causal")
    mask = drawn((shapes[0][-2], shapes[1][-2]))[0] > 0 if has_mask else None
    q, k, v = drawn(*shapes, dtype=dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want, sums = plain(*leaves, mask, **how)
    (ct,) = drawn(tuple(want.shape), dtype=dtype)
    grads = torch.autograd.grad((want * ct).sum(), leaves)
    there = mask.to(comm.device) if mask is not None else None
    operands = [x.to(comm.device) for x in (q, k, v)]
    made = attend(*operands, there, **how)
    far = {torch.float64: 1e-10, torch.float32: 2e-5}.get(dtype, 4e-2)
    for out, given in zip(lying(made[0]), reversed(lying(ct.to(comm.device))), strict=True):
        found = attend_grad(*operands, out, made[1], given, there, **how)
        for x, y in zip((*made, *found), (want, sums, *grads), strict=True):
            torch.testing.assert_close(x.double().cpu(), y.detach(), rtol=far, atol=far)


@pytest.mark.parametrize("runs", [[(0, 32), (96, 128)], [(32, 96)], [(5, 40), (77, 101)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_runs(
    dtype: torch.dtype, runs: list[tuple[int, int]], comm: mf.Communicator
) -> None:
    """Rows in zigzag order, whose tiles cut the sums of all rows."""
    at = torch.cat([torch.arange(*run) for run in runs])
    whole = drawn((2, 8, 128, 64), (2, 2, 128, 64), (2, 2, 128, 64), dtype=dtype)
    leaves = [x.double().requires_grad_() for x in whole]
    want, sums = (x[:, :, at] for x in plain(*leaves, None, is_causal=True, enable_gqa=True))
    (ct,) = drawn(tuple(want.shape), dtype=dtype)
    grads = torch.autograd.grad((want * ct).sum(), leaves)
    q, k, v = (x.to(comm.device) for x in whole)
    how: Any = {"is_causal": True, "enable_gqa": True, "rows": runs}
    q = q[:, :, at.to(q.device)]
    out, of_out = attend(q, k, v, **how)
    of_q, *others = attend_grad(q, k, v, out, of_out, ct.to(comm.device), **how)
    far = 2e-5 if dtype == torch.float32 else 4e-2
    pairs = zip(
        (out, of_out, of_q, *others), (want, sums, grads[0][:, :, at], *grads[1:]), strict=True
    )
    for x, y in pairs:
        torch.testing.assert_close(x.double().cpu(), y.detach(), rtol=far, atol=far)


def lying(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tensor as it is, row-major, and with its heads side by side; some kernels mix these up."""
    if x.ndim < 3:
        return x, x.contiguous(), x.mT.contiguous().mT
    return x, x.contiguous(), x.transpose(-2, -3).contiguous().transpose(-2, -3)
