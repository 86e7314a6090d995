"""Parts of composed reductions and of gradients: first places of extremes, log(sum(exp(x)))."""

from __future__ import annotations

import torch

from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, views
from mdfuse.frontend.ops.pointwise import ROWS, where
from mdfuse.frontend.ops.recording import again, record


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


def log_of_sum(wide: Handle, over: tuple[int, ...] | None) -> Handle:
    """log(sum(exp(x))) over dims (None: all), which are kept: see `parts_of_log`."""
    part = record("real", wide) if wide.dtype.is_complex else wide
    limits = torch.finfo(part.dtype)
    top = record("clamp", _top(part, over), min=limits.min, max=limits.max)
    return _log_below(wide, top, over) + top


def parts_of_log(wide: Handle, over: tuple[int, ...]) -> tuple[Handle, Handle]:
    """Return the largest element over dims, and log(sum(exp(x))) minus it; NaN of infinities.

    No gradient goes through the largest element, because it is subtracted and added again. For
    complex numbers it is the largest real part, which gives the size of the exponentials.

    Args:
        wide: x of at least 32 bits, computed in a block of `again`, which is continued.
        over: the dims, which are kept.
    """
    top = _top(wide, over)
    return top, _log_below(wide, top, over)


def _top(x: Handle, over: tuple[int, ...] | None) -> Handle:
    """Return the largest element over dims, which are kept; -inf without elements."""
    some = {"identity": True} if _may_be_none(x, over) else {}
    return record("detach", record("max", x, dims=over, keepdim=True, **some))


def _may_be_none(x: Handle, over: tuple[int, ...] | None) -> bool:
    """Return whether a reduced dim may be empty: extent 0, or chosen by each run."""
    extents = x.shape if over is None else [x.shape[d] for d in over]
    return any(isinstance(n, Extent) or n == 0 for n in extents)


def _log_below(wide: Handle, top: Handle, over: tuple[int, ...] | None) -> Handle:
    with again(wide, is_more=True):
        shares = ROWS["exp"](wide - top)
    return ROWS["log"](record("sum", shares, dims=over, keepdim=True, dtype=None))
