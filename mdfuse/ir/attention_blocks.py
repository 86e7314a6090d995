"""Attention by blocks of keys, where no library's kernel computes it: the scores are not kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: How many keys a block has.
BLOCK = 128


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: f32, or f64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of attention, of which only a block of keys is there at once.

    Where heads share keys, a dim stands behind the heads for those that share: 1 of the keys.
    """

    q: Tensor
    k: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float

    @property
    def shared(self) -> int:
        """The number of query heads that share one key head; 0 where there are no heads."""
        if self.q.ndim < 3 or not self.k.shape[-3]:
            return 0
        return self.q.shape[-3] // self.k.shape[-3]

    def of_query(self, x: Tensor) -> Tensor:
        """Return […,heads,rows,n] as […,heads of keys,those that share,rows,n]."""
        return x.unflatten(-3, (-1, self.shared)) if self.shared else x

    def of_key(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-3) if self.shared else x

    def joined(self, x: Tensor) -> Tensor:
        """Undo `of_query`."""
        return x.flatten(-4, -3) if self.shared else x

    def summed(self, x: Tensor) -> Tensor:
        """Add up what the heads that share give, which undoes `of_key`."""
        return x.sum(-3) if self.shared else x

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the keys of each block, and their scores: -inf where they are hidden."""
        wide = wide_of(self.q.dtype)
        q, n = self.of_query(self.q.to(wide) * self.scale), self.k.shape[-2]
        rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
        mask = None if self.mask is None else self.mask.expand(*self.q.shape[:-1], n)
        for start in range(0, n, BLOCK):
            at = slice(start, min(start + BLOCK, n))
            scores = q @ self.of_key(self.k[..., at, :].to(wide)).mT
            if self.is_causal:
                hidden = rows < torch.arange(at.start, at.stop, device=q.device)
                scores = scores.masked_fill(hidden, -math.inf)
            elif mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~self.of_query(mask[..., at]), -math.inf)
            elif mask is not None:
                scores = scores + self.of_query(mask[..., at].to(wide))
            yield at, scores


def attend_blocks(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """Go through the keys once: the greatest score, the sum of powers and of values so far."""
    wide, rows = wide_of(v.dtype), scores.of_query(scores.q).shape[:-1]
    top = torch.full(rows, -math.inf, dtype=wide, device=v.device)
    total, weighted = torch.zeros_like(top), v.new_zeros((*rows, v.shape[-1]), dtype=wide)
    shift = torch.zeros_like(top)
    for at, part in scores.blocks():
        new = torch.maximum(top, part.amax(-1))
        shift = new.masked_fill(new == -math.inf, 0)
        fade, powers = (top - shift).exp(), (part - shift.unsqueeze(-1)).exp()
        total = total * fade + powers.sum(-1)
        weighted = weighted * fade.unsqueeze(-1) + powers @ scores.of_key(v[..., at, :].to(wide))
        top = new
    out = weighted / total.masked_fill(total == 0, 1).unsqueeze(-1)
    sums = scores.joined((total.log() + shift).unsqueeze(-1)).squeeze(-1)
    return scores.joined(out).to(v.dtype), sums


def grad_of_blocks(
    scores: Scores, v: Tensor, out: Tensor, sums: Tensor, ct: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the cotangent of averages means for q, k and v, a block of keys at a time."""
    wide, q = wide_of(v.dtype), scores.of_query(scores.q)
    given = scores.of_query(ct.to(wide))
    sums = scores.of_query(sums.masked_fill(sums == -math.inf, 0).unsqueeze(-1))
    delta = (given * scores.of_query(out.to(wide))).sum(-1, keepdim=True)
    dq = torch.zeros_like(q, dtype=wide)
    dk, dv = torch.empty_like(scores.k), torch.empty_like(v)
    for at, part in scores.blocks():
        powers = (part - sums).exp()
        dv[..., at, :] = scores.summed(powers.mT @ given)
        ds = powers * (given @ scores.of_key(v[..., at, :].to(wide)).mT - delta) * scores.scale
        dq += ds @ scores.of_key(scores.k[..., at, :].to(wide))
        dk[..., at, :] = scores.summed(ds.mT @ q.to(wide))
    return scores.joined(dq).to(scores.q.dtype), dk, dv
