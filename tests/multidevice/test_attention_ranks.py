"""Attention's sums and its gradient by the kernels of GPUs, against plain torch in float64."""

from __future__ import annotations

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


def lying(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tensor as it is, row-major, and with its heads side by side; some kernels mix these up."""
    if x.ndim < 3:
        return x, x.contiguous(), x.mT.contiguous().mT
    return x, x.contiguous(), x.transpose(-2, -3).contiguous().transpose(-2, -3)
