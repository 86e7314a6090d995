"""Rows that go to the ranks of their experts and back, as people write it by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; gradients come the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        """Send so many rows to each rank, and receive so many."""
        ctx.leaving, ctx.arriving = leaving, arriving
        y = x.new_empty(sum(arriving), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), arriving, leaving)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return gradients to where the rows came from."""
        (dy,) = gradients
        dx = dy.new_empty(sum(ctx.leaving), dy.shape[1])
        dist.all_to_all_single(dx, dy.contiguous(), ctx.leaving, ctx.arriving)
        return dx, None, None


def _routed(x: Tensor, router: Tensor, size: Any, parts: int, experts: list[Tensor]) -> Tensor:
    """Send rows to their experts, compute these if there are any, and bring the rows back."""
    count = size.experts // parts
    weights, ids = F.linear(x, router).float().softmax(-1).topk(size.choices, -1)
    flat, places = ids.flatten().sort()
    leaving = torch.bincount(flat, minlength=size.experts)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    both = torch.stack([leaving, arriving]).view(2, parts, count).sum(-1).tolist()
    rows = _Exchange.apply(x[places // size.choices], *both)
    if experts:
        of = torch.arange(size.experts, device=x.device).remainder(count)
        order = of.repeat_interleave(arriving, output_size=rows.shape[0]).argsort(stable=True)
        ends = arriving.view(parts, count).sum(0).cumsum(0).to(torch.int32)
        gate, up, down = experts
        h = rows[order]
        h = F.silu(F.grouped_mm(h, gate, offs=ends)) * F.grouped_mm(h, up, offs=ends)
        rows = F.grouped_mm(h, down, offs=ends)[_inverse(order)]
    y = _Exchange.apply(rows, both[1], both[0])[_inverse(places)]
    y = y.view(-1, size.choices, x.shape[1])
    return (y * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def layer(x: Tensor, router: Tensor, *experts: Tensor, size: Any, parts: int) -> Tensor:
    """Compute a layer of experts on this rank's tokens, by this rank's experts."""
    return _routed(x, router, size, parts, [*experts])


def ways(x: Tensor, router: Tensor, *, size: Any, parts: int) -> Tensor:
    """Send rows to the ranks of their experts, and bring them back."""
    return _routed(x, router, size, parts, [])


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
