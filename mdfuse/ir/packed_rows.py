"""The rows of a ragged value that are there, one after the other: part by part, by expert in each.

A rank stores these rows, [rows,d], beside how many there are of each part and expert, n[p,e]. Rows
behind them, of a buffer for as many as there may be, count for nothing. Where experts compute, rows
lie expert by expert, by part in each: they come from there, and go back, once for all products.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

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


def to_experts(x: Tensor, n: Tensor) -> Tensor:
    """Return rows that lie part by part, expert by expert."""
    if not _is_turned(x, n):
        return x
    if groups.may_look(x):
        return _swapped(x, n)
    return x[_by_expert(x, n.T)]  # reading rows takes half the time of writing them in order


def to_parts(x: Tensor, n: Tensor) -> Tensor:
    """Return rows that lie expert by expert, part by part."""
    if not _is_turned(x, n):
        return x
    if groups.may_look(x):
        return _swapped(x, n.T)
    return x[_by_expert(x, n)]


def _is_turned(x: Tensor, n: Tensor) -> bool:
    """Return whether rows may lie otherwise by expert than by part."""
    return min(n.shape) > 1 and x.numel() > 0 and not x.is_meta


def _swapped(x: Tensor, n: Tensor) -> Tensor:
    """Put rows that lie by the first dim of the counts in the order of the second one."""
    (first, second), sizes = n.shape, [*chain.from_iterable(n.tolist())]
    behind = x.shape[0] - sum(sizes)
    if behind < 0:  # over a capacity: such a run is refused
        return x.clone()  # no number decides whose memory it is
    pieces = x.split([*sizes, behind])
    return torch.cat(
        [pieces[i * second + j] for j in range(second) for i in range(first)] + [pieces[-1]]
    )


def _by_expert(x: Tensor, n: Tensor) -> Tensor:
    """Return where each of the rows lies by expert; those that count for nothing stay."""
    by_part, turned = n.flatten(), n.T.flatten()
    ends = by_part.cumsum(0)
    there = (turned.cumsum(0) - turned).view(n.shape[1], n.shape[0]).T.flatten()
    shifts = torch.cat([there - ends + by_part, ends.new_zeros(1)])
    at = torch.arange(x.shape[0], device=x.device)
    at = at + shifts[torch.searchsorted(ends, at, right=True)]
    return at.clamp(max=x.shape[0] - 1)  # over a capacity: such a run is refused


def multiply(x: Tensor, weight: Tensor, n: Tensor, by_expert: bool) -> Tensor:
    """Multiply each row [rows,k] with the matrix of its expert, of [e,k,n]."""
    if by_expert:
        return groups.multiply_packed(x, weight, _ends(n))
    products = groups.multiply_packed(to_experts(x, n), weight, _ends(n))
    return to_parts(products, n)


def multiply_grad(x: Tensor, ct: Tensor, n: Tensor, by_expert: bool) -> Tensor:
    """Return the gradient of the matrices [e,k,n]: of each expert the product of its rows."""
    if not by_expert:
        x, ct = to_experts(x, n), to_experts(ct, n)
    shape = (n.shape[1], x.shape[1], ct.shape[1])
    return groups.multiply_grad(x, ct, _ends(n), shape=shape)


def total(x: Tensor, n: Tensor, by_expert: bool) -> Tensor:
    """Sum the rows of each part and expert: [rows,d] -> [p,e,d]."""
    if by_expert:
        return total(x, n.T, False).transpose(0, 1)
    wide = x.float() if x.element_size() < 4 else x
    sums = wide.new_zeros((n.numel() + 1, x.shape[1])).index_add_(0, _groups(x, n), wide)
    return sums[:-1].to(x.dtype).view(*n.shape, x.shape[1])


def spread(rows: Tensor, x: Tensor, n: Tensor, by_expert: bool) -> Tensor:
    """Repeat a row per part and expert, [p,e,d], for each row of x; see `ragged.spread`."""
    if by_expert:
        return spread(rows.transpose(0, 1), x, n.T, False)
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
