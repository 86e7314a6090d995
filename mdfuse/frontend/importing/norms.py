"""Batch normalisation in training: the result, and what its statistics become."""

from __future__ import annotations

import math
from typing import Any

import torch

from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle

ops: Any = operations


def batch_norm_of_training(
    x: Handle,
    weight: Handle | None,
    bias: Handle | None,
    mean: Handle,
    var: Handle,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The result, mean and root of the batch, and the kept statistics afterwards."""
    wide = x.to(torch.float32) if x.dtype.itemsize < 4 else x
    spread, centre = ops.var_mean(wide, [d for d in range(x.ndim) if d != 1], correction=0)
    y = ops.batch_norm(x, centre, spread, weight, bias, False, momentum, eps)
    count = math.prod(x.shape) // x.shape[1]
    unbiased = spread * (count / max(count - 1, 1))
    return (
        y,
        centre,
        ops.rsqrt(spread + eps),
        mean * (1 - momentum) + centre * momentum,
        var * (1 - momentum) + unbiased * momentum,
    )


def weight_norm(v: Handle, g: Handle, dim: int = 0) -> Any:
    """v with the norm g in each place of a dim (Salimans, Kingma 2016); dim -1: with one norm."""
    others = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    return v * (g / ops.norm(v, 2, others, True))
