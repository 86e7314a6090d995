"""Reductions as torch computes them: over some dims, or none; also into a buffer (`out`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import reduced_dims


def _unreduced(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return a copy: the result of a reduction over no dims."""
    return x.to(dtype, copy=True) if out is None else out.copy_(x)


def add_up(
    x: Tensor,
    *,
    dims: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add up over some dims, or all; a buffer decides the dtype."""
    chosen = reduced_dims(dims, x.ndim)
    dtype = dtype if out is None else out.dtype
    if not chosen:
        return _unreduced(x, dtype or torch.sum(x.new_empty(0)).dtype, out)
    return torch.sum(x, chosen, keepdim=keepdim, dtype=dtype, out=out)


def multiply(
    x: Tensor,
    *,
    dims: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply over some dims, or all; torch does so over one dim at a time."""
    *others, last = sorted(reduced_dims(dims, x.ndim), reverse=True) or (None,)
    for d in others:
        x = torch.prod(x, d, keepdim=keepdim, dtype=dtype)
    if last is None:
        return _unreduced(x, dtype or torch.prod(x.new_empty(0)).dtype, out)
    dtype = dtype if out is None else out.dtype
    return torch.prod(x, last, keepdim=keepdim, dtype=dtype, out=out)


def extreme(name: str, pick: Callable[[torch.dtype], float | int | bool]) -> Callable[..., Tensor]:
    """Return amin or amax, which with `identity` is the reduction's identity over an empty part.

    With `first` the gradient goes to the first of equals, and not to all of them evenly.

    Args:
        name: "amin" or "amax".
        pick: dtype -> the identity.
    """
    function = getattr(torch, name)

    def call(
        x: Tensor,
        *,
        dims: Any = None,
        keepdim: bool = False,
        first: bool = False,
        identity: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        chosen = reduced_dims(dims, x.ndim)
        if not chosen:
            return _unreduced(x, x.dtype, out)
        if identity and 0 in (x.shape[d] for d in chosen):
            shape = [n if d not in chosen else 1 for d, n in enumerate(x.shape)]
            kept_shape = [n for d, n in enumerate(shape) if keepdim or d not in chosen]
            return (x.new_empty(kept_shape) if out is None else out).fill_(pick(x.dtype))
        return function(x, dim=chosen, keepdim=keepdim, out=out)  # type: ignore[no-any-return]

    return call


def truth(name: str) -> Callable[..., Tensor]:
    """Return any or all; over no dims they tell whether each element is not 0."""
    function = getattr(torch, name)

    def call(
        x: Tensor, *, dims: Any = None, keepdim: bool = False, out: Tensor | None = None
    ) -> Tensor:
        chosen = reduced_dims(dims, x.ndim)
        if chosen:
            return function(x, dim=chosen, keepdim=keepdim, out=out)  # type: ignore[no-any-return]
        return _unreduced(x != 0, torch.uint8 if x.dtype == torch.uint8 else torch.bool, out)

    return call


def average(
    x: Tensor, *, dims: Any = None, keepdim: bool = False, count: int | None = None
) -> Tensor:
    """Return the mean; with `count`, this part's share of the mean over `count` elements."""
    chosen = reduced_dims(dims, x.ndim)
    if count is None:
        return torch.mean(x, chosen, keepdim=keepdim) if chosen else x.clone()
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return (torch.sum(x, chosen, keepdim=keepdim, dtype=wide) / count).to(x.dtype)
