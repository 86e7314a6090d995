"""The largest and the smallest elements, and their indices.

An index is the smallest place of the extreme, so the ranks' indices can be reduced as values are,
and the dim may be split.
"""

from __future__ import annotations

from typing import NamedTuple

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import pointwise
from mdfuse.frontend.ops.recording import (
    Dims,
    Elementwise,
    Integers,
    Operation,
    checked,
    named,
    record,
)
from mdfuse.frontend.ops.reduction_parts import first_extreme, first_place
from mdfuse.frontend.ops.reductions import amax, amin


def _place_of(name: str, extreme: Elementwise) -> Operation:
    def function(
        x: Handle, dim: int | None = None, keepdim: bool = False, *, dims: int | None = None
    ) -> Handle:
        given = checked(x, dim, dims)
        over = tuple(range(x.ndim) if given is None else (d % x.ndim for d in given))
        return amin(first_place(x, extreme(x, over, keepdim=True), over), over, keepdim)

    end = "est element over a dim stands first (in x flattened by default)."
    return named(f"arg{name}", f"Where the {_WORDS[name]}{end}", function)


_WORDS = {"max": "larg", "min": "small"}
argmax, argmin = _place_of("max", amax), _place_of("min", amin)


class Extremes(NamedTuple):
    """The result of `max` and `min` along a dim, as in torch."""

    values: Handle
    indices: Handle


def _as_in_torch(name: str, over: Elementwise, pairwise: Elementwise) -> Operation:
    def function(
        x: Handle, dim: Handle | Dims = None, keepdim: bool = False, *, dims: Integers | None = None
    ) -> Handle | Extremes:
        if isinstance(dim, Handle):
            return pairwise(x, dim)
        if isinstance(dim, int) and dims is None:
            dims = checked(x, dim) or ()
            at = tuple(d % x.ndim for d in dims)
            values = first_extreme(name, x, dims, keepdim)
            with_dims = values if keepdim or not at else record("unsqueeze", values, dims=at)
            return Extremes(values, amin(first_place(x, with_dims, at), dims, keepdim))
        return over(x, dim, keepdim, dims=dims)

    doc = f"With a dim the pair (values, indices); with none, or a list of dims, `{over.__name__}`"
    return named(name, f"{doc}; {name}(x, y): `{pairwise.__name__}`.", function)


max = _as_in_torch("max", amax, pointwise.maximum)
min = _as_in_torch("min", amin, pointwise.minimum)
