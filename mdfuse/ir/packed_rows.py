"""The rows of a ragged value that are there, one after the other: part by part, by expert in each.

A rank stores these rows alone, [rows,d], beside how many there are of each part and expert, n[p,e].
"""

from __future__ import annotations

import torch
from torch import Tensor

from mdfuse.ir import groups


def multiply(x: Tensor, weight: Tensor, n: Tensor) -> Tensor:
    """Multiply each row [rows,k] with the matrix of its expert, of [e,k,n]."""
    order = _by_expert(x, n)
    products = groups.multiply(x if order is None else x[order], weight, _ends(n))
    if order is None:
        return products
    return torch.empty_like(products).index_copy_(0, order, products)


def multiply_grad(x: Tensor, ct: Tensor, n: Tensor) -> Tensor:
    """Return the gradient of the matrices [e,k,n]: of each expert the product of its rows."""
    order = _by_expert(x, n)
    if order is not None:
        x, ct = x[order], ct[order]
    shape = (n.shape[1], x.shape[1], ct.shape[1])
    return groups.multiply_grad(x, ct, _ends(n), shape=shape)


def total(x: Tensor, n: Tensor) -> Tensor:
    """Sum the rows of each part and expert: [rows,d] -> [p,e,d]."""
    wide = x.float() if x.element_size() < 4 else x
    sums = wide.new_zeros((n.numel(), x.shape[1])).index_add_(0, _groups(x, n), wide)
    return sums.to(x.dtype).view(*n.shape, x.shape[1])


def spread(rows: Tensor, x: Tensor, n: Tensor) -> Tensor:
    """Repeat a row per part and expert, [p,e,d], for each row of x; see `ragged.spread`."""
    each = rows.expand(*n.shape, max(x.shape[1], rows.shape[2])).flatten(0, 1)
    return each[_groups(x, n)]


def _groups(x: Tensor, n: Tensor) -> Tensor:
    """Return the place of each row's part and expert among those of n."""
    return torch.searchsorted(
        n.flatten().cumsum(0), torch.arange(x.shape[0], device=x.device), right=True
    ).clamp(max=max(n.numel() - 1, 0))


def _ends(n: Tensor) -> Tensor:
    """Return behind which row each expert ends, where its rows of all parts lie together."""
    return n.sum(0).cumsum(0)


def _by_expert(x: Tensor, n: Tensor) -> Tensor | None:
    """Return the rows expert by expert; None where they lie so already."""
    if min(n.shape) < 2:
        return None
    return (_groups(x, n) % n.shape[1]).argsort(stable=True)
