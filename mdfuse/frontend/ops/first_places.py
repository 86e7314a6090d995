"""The first index of extremes, for operations and gradients."""

from __future__ import annotations

import torch

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, views
from mdfuse.frontend.ops.pointwise import ROWS, where
from mdfuse.frontend.ops.recording import record


def first_extreme(name: str, x: Handle, dims: tuple[int, ...], keepdim: bool) -> Handle:
    """The "max" or "min" over dims, whose gradient goes to the first of equals."""
    return record(name, x, dims=dims, keepdim=keepdim, first=True)


def first_place(x: Handle, extreme: Handle, over: tuple[int, ...]) -> Handle:
    """Return the first row-major index along dims of the extreme (with its dims kept)."""
    is_there = ROWS["eq"](x, extreme)
    if x.dtype.is_floating_point:  # a NaN is the extreme, and equals nothing
        is_there = ROWS["logical_or"](is_there, ROWS["isnan"](x))
    end, places = 1, None
    for d in reversed(over):
        along = creations.arange(0, end * x.shape[d], end)
        behind = x.ndim - 1 - d
        along = views.reshape(along, (-1, *(1,) * behind)) if behind else along
        end, places = end * x.shape[d], along if places is None else places + along
    if places is None:
        places = creations.full((), 0, dtype=torch.int64)
    return where(is_there, places, end)
