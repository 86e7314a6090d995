"""Batch normalisation, as pointwise operations and reductions over the batch."""

from __future__ import annotations

import math
from typing import Any

import torch

from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle

ops: Any = operations


def batch_norm(
    x: Handle,
    weight: Handle | None,
    bias: Handle | None,
    mean: Handle | None,
    var: Handle | None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Batch normalisation by statistics that are known; by those of the batch where none are."""
    if training or mean is None or var is None:
        return _by_batch(x, weight, bias, eps)[0]
    return _normalised(x, mean, ops.rsqrt(var + eps), weight, bias)


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
    """The same in training: the result, mean and root of the batch, statistics afterwards."""
    y, centre, spread = _by_batch(x, weight, bias, eps)
    count = math.prod(x.shape) // x.shape[1]
    unbiased = spread * (count / max(count - 1, 1))
    return (
        y,
        centre,
        ops.rsqrt(spread + eps),
        mean * (1 - momentum) + centre * momentum,
        var * (1 - momentum) + unbiased * momentum,
    )


def _by_batch(
    x: Handle, weight: Handle | None, bias: Handle | None, eps: float
) -> tuple[Any, Any, Any]:
    dims = [d for d in range(x.ndim) if d != 1]
    wide = x.to(torch.float32) if x.dtype.itemsize < 4 else x
    spread, centre = ops.var_mean(wide, dims, correction=0)
    return _normalised(x, centre, ops.rsqrt(spread + eps), weight, bias), centre, spread


def _normalised(x: Handle, mean: Any, root: Any, weight: Any, bias: Any) -> Any:
    shape = (1, -1, *(1,) * (x.ndim - 2))
    mean, root, weight, bias = (
        None if v is None else ops.reshape(v, shape) for v in (mean, root, weight, bias)
    )
    y = (x - mean) * root
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y if y.dtype == x.dtype else ops.cast(y, x.dtype)
