"""Extremes of floats through libraries that ignore NaN: as integers in the same order.

Torch's `amax` is NaN if any number is NaN. Libraries compare numbers, and every comparison with NaN
is false.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mdfuse.backends.base import Work, flat
from mdfuse.backends.transfers import Post
from mdfuse.backends.work import Posted, leave
from mdfuse.layouts.call import Call


def is_ordered(call: Call, dtype: torch.dtype) -> bool:
    """Return whether a call takes the extremes of floats."""
    return call.reduce_op in ("max", "min") and dtype.is_floating_point


def keys(x: Tensor, op: str) -> Tensor:
    """Return integers in the order of floats, of 64 bits for f64, of 32 for others.

    NaN is above all others for "max", and below them for "min".

    >>> of = torch.tensor([-torch.inf, -1.0, 0.0, 2.0, torch.nan])
    >>> keys(of, "max").tolist() == sorted(keys(of, "max").tolist())
    True
    """
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    integer = torch.int64 if wide.dtype is torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    bits = wide.view(integer)
    ordered = torch.where(bits < 0, bits ^ limits.max, bits)
    return ordered.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def floats(ordered: Tensor) -> Tensor:
    """Return the floats of `keys`, f64 or f32."""
    limits = torch.iinfo(ordered.dtype)
    wide = torch.float64 if ordered.dtype is torch.int64 else torch.float32
    return torch.where(ordered < 0, ordered ^ limits.max, ordered).view(wide)


def in_order(build: Callable[[torch.dtype], Post], call: Call, dtype: torch.dtype) -> Post:
    """Return a post of floats, of which a library takes the extremes as integers.

    Args:
        build: returns the library's own post of buffers of a dtype.
        call: a reduction by max or min.
        dtype: that of the floats.
    """
    integer = torch.int64 if dtype is torch.float64 else torch.int32
    post_keys, op = build(integer), call.reduce_op or ""

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        given = [keys(flat(x), op) for x in srcs]
        into = [torch.empty(x.numel(), dtype=integer, device=x.device) for x in dsts]
        work = post_keys(given, into)

        def finish() -> None:
            for dst, reduced in zip(dsts, into, strict=True):
                flat(dst).copy_(floats(reduced))
            leave((*given, *into))

        return Posted(call, (work,), given, finish)

    return post
