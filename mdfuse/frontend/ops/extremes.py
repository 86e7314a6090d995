"""The largest and the smallest elements: how large, and where they stand.

An index is the smallest place at which the extreme stands, so it is joined from the ranks' parts as
values are, and a dim may be split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, pointwise, views
from mdfuse.frontend.ops.pointwise import ROWS
from mdfuse.frontend.ops.recording import Dims, Operation, checked, record
from mdfuse.frontend.ops.reductions import Reduction, amax, amin


def _first_place(x: Handle, extreme: Handle, over: tuple[int, ...]) -> Handle:
    """Where along dims, in row-major order, the extreme (with its dims kept) stands first."""
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
    return pointwise.where(is_there, places, end)


def _place_of(name: str, extreme: Reduction) -> Reduction:
    def function(
        x: Handle, dim: int | None = None, keepdim: bool = False, *, dims: int | None = None
    ) -> Handle:
        given = checked(x, dim, dims)
        over = tuple(range(x.ndim) if given is None else (d % x.ndim for d in given))
        return amin(_first_place(x, extreme(x, over, keepdim=True), over), over, keepdim)

    end = "est element over a dim stands first (in x flattened by default)."
    function.__name__, function.__doc__ = f"arg{name}", f"Where the {_WORDS[name]}{end}"
    return function


_WORDS = {"max": "larg", "min": "small"}
argmax, argmin = _place_of("max", amax), _place_of("min", amin)


class Extremes(NamedTuple):
    """What `max` and `min` along a dim give, as in torch."""

    values: Handle
    indices: Handle


def _as_in_torch(name: str, over: Reduction, pairwise: Reduction) -> Operation:
    def function(
        x: Handle, dim: Dims | Handle = None, keepdim: bool = False, *, dims: Dims = None
    ) -> Handle | Extremes:
        if isinstance(dim, Handle):
            return pairwise(x, dim)
        if isinstance(dim, int) and dims is None:
            dims = checked(x, dim) or ()
            at = tuple(d % x.ndim for d in dims)
            values = over(x, dims, keepdim)
            kept = values if keepdim or not at else record("unsqueeze", values, dims=at)
            return Extremes(values, amin(_first_place(x, kept, at), dims, keepdim))
        return over(x, dim, keepdim, dims=dims)

    function.__name__ = name
    function.__doc__ = (
        f"With a dim the pair (values, indices); with none, or a list of dims, `{over.__name__}`; "
        f"{name}(x, y): `{pairwise.__name__}`."
    )
    return function


max = _as_in_torch("max", amax, pointwise.maximum)
min = _as_in_torch("min", amin, pointwise.minimum)
