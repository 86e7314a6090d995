"""The rows of a ragged value that are there, one after the other: part by part, by expert in each.

A rank stores these rows, [rows,d], beside how many there are of each part and expert, n[p,e]. Rows
behind them, of a buffer for as many as there may be, count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mdfuse.ir import groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """A rank's parts of rows, each in groups of experts, which lie at places of their own.

    Attributes:
        parts: the parts, of all in the counts.
        experts: the experts, likewise.
        groups: how many groups of these there are.
        width: the experts of a group; the last groups may have fewer.
    """

    parts: tuple[int, int]
    experts: tuple[int, int]
    groups: int
    width: int

    @property
    def number(self) -> int:
        """The number of blocks."""
        return (self.parts[1] - self.parts[0]) * self.groups

    def sizes(self, n: Tensor) -> Tensor:
        """Return how many rows there are of each part and group, one after the other."""
        counts = n[slice(*self.parts), slice(*self.experts)]
        counts = pad(counts, (0, self.groups * self.width - counts.shape[1]))
        return counts.reshape(counts.shape[0], self.groups, self.width).sum(2).flatten()


def pack(out: Tensor, x: Tensor, n: Tensor, *, blocks: RowBlocks) -> None:
    """Take the rows that are there one after the other; the host knows no number of them.

    Args:
        out: [rows,…], as many as there may be; zeros follow those that are there.
        x: [parts,most,…] or [parts,groups,most,…], with the rows of a block at its beginning. Rows
            for which a block has no room are zeros.
        n: the counts of all, [parts,experts].
        blocks: how those of this rank lie.
    """
    sizes = blocks.sizes(n)
    if not (x.numel() and out.numel() and sizes.numel()):
        out.zero_()
        return
    places = x.reshape(-1, *out.shape[1:])
    room, ends = places.shape[0] // sizes.shape[0], sizes.cumsum(0)
    at = torch.arange(out.shape[0], device=x.device)
    block = torch.searchsorted(ends, at, right=True)
    is_there = block < sizes.shape[0]
    block = block.clamp(max=sizes.shape[0] - 1)
    at = at - (ends - sizes)[block]
    _take(out, places, block * room + at, is_there & (at < room))


def unpack(out: Tensor, x: Tensor, n: Tensor, *, blocks: RowBlocks) -> None:
    """Put rows at the beginnings of their blocks, zeros behind them; see `pack`."""
    sizes = blocks.sizes(n)
    if not (out.numel() and x.numel() and sizes.numel()):
        out.zero_()
        return
    places = out.view(-1, *x.shape[1:])
    room = torch.arange(places.shape[0] // sizes.shape[0], device=x.device)
    at = (sizes.cumsum(0) - sizes).unsqueeze(1) + room
    _take(places, x, at.flatten(), (room < sizes.unsqueeze(1)).flatten())


def _take(out: Tensor, x: Tensor, at: Tensor, is_there: Tensor) -> None:
    """Write the rows of x at some places, zeros for those that are not there."""
    rows = x[at.clamp(0, x.shape[0] - 1)]
    is_there = is_there.view(-1, *(1,) * (x.ndim - 1))
    torch.where(is_there, rows, rows.new_zeros(()), out=out)


def multiply(x: Tensor, weight: Tensor, n: Tensor) -> Tensor:
    """Multiply each row [rows,k] with the matrix of its expert, of [e,k,n]."""
    order = _by_expert(x, n)
    given = x if order is None else x[order]
    products = groups.multiply(given, weight, _ends(n), has_zeros=False)
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
    sums = wide.new_zeros((n.numel() + 1, x.shape[1])).index_add_(0, _groups(x, n), wide)
    return sums[:-1].to(x.dtype).view(*n.shape, x.shape[1])


def spread(rows: Tensor, x: Tensor, n: Tensor) -> Tensor:
    """Repeat a row per part and expert, [p,e,d], for each row of x; see `ragged.spread`."""
    each = rows.expand(*n.shape, max(x.shape[1], rows.shape[2])).flatten(0, 1)
    return torch.cat([each, each.new_zeros((1, each.shape[1]))])[_groups(x, n)]


def _groups(x: Tensor, n: Tensor) -> Tensor:
    """Return the place of each row's part and expert among those of n; behind them for no row's."""
    return torch.searchsorted(
        n.flatten().cumsum(0), torch.arange(x.shape[0], device=x.device), right=True
    )


def _ends(n: Tensor) -> Tensor:
    """Return behind which row each expert ends, where its rows of all parts lie together."""
    return n.sum(0).cumsum(0)


def _by_expert(x: Tensor, n: Tensor) -> Tensor | None:
    """Return the rows expert by expert; None where they lie so already."""
    if min(n.shape) < 2:
        return None
    groups, experts = _groups(x, n), n.shape[1]
    return torch.where(groups < n.numel(), groups % experts, experts).argsort(stable=True)
