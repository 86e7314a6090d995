"""Batch normalisation in training, with updated statistics; norms of weights and vectors."""

from __future__ import annotations

import math
from typing import Any

import torch

from mdfuse.errors import DefinitionError
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


def linalg_norm(
    x: Handle, ord: Any = None, dim: Any = None, keepdim: bool = False, **how: Any
) -> Any:
    """`torch.linalg.norm` of vectors; without an order, of all dims that are named."""
    dims = [dim] if isinstance(dim, int) else dim
    is_of_vectors = ord is None or (x.ndim == 1 if dims is None else len(dims) == 1)
    if not is_of_vectors:
        raise DefinitionError(
            f"linalg.norm of matrices, with ord={ord}",
            because="there are norms of vectors alone",
            hint="torch.linalg.vector_norm(x, ord, dim), which sees several dims as one",
        )
    return ops.vector_norm(x, 2 if ord is None else ord, dims, keepdim, **how)
