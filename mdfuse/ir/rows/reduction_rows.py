"""Reductions over dims, which may be split; scans along a dim that is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mdfuse.ir import calls, dims, reduction_calls, shapes
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import Attr, attr
from mdfuse.ir.dtype_limits import highest, lowest
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW, DENSE, Writes, exact, rounded


def _reduce(
    name: str, call: Callable[..., Any], op: str, writes: Writes, *others: Attr, **fields: Any
) -> None:
    """Add the row of a reduction; the parts of a split dim are joined by the reduce op `op`."""
    attrs = (attr("dims", "dims"), attr("keepdim", "bool"), *others)
    fields = {"partial": "reduce", **fields, "host": "reduce", "attrs": attrs}
    row(name, call, dims.reduction(op), shapes.reduction, writes, **fields)


_WIDER = attr("dtype", "dtype")
_IDENTITY = attr("identity", "bool")
_COUNT = attr("count", "extent", is_local=True)
_reduce("sum", reduction_calls.add_up, "sum", rounded(reduction_calls.add_up), _WIDER)
_reduce("prod", reduction_calls.multiply, "prod", rounded(reduction_calls.multiply), _WIDER)
for _name, _pick in (("max", lowest), ("min", highest)):
    _call = reduction_calls.extreme(f"a{_name}", _pick)
    _own = (attr("first", "bool"), _IDENTITY)
    _reduce(_name, _call, _name, rounded(_call), *_own, localize=of_part.with_identity)
# A part of a mean is divided by the global count.
_reduce("mean", reduction_calls.average, "sum", DENSE, _COUNT, localize=of_part.global_count)
_any, _all = reduction_calls.truth("any"), reduction_calls.truth("all")
_reduce("any", _any, "bor", exact(_any))
# all(a & b) is not all(a) & all(b) for integers, as 1 & 2 shows: no Partial(band) is taken.
_reduce("all", _all, "band", exact(_all), partial="")

# Along a dim that is whole: running sums and extremes, dims turned round.
_ALONG = (attr("dim", "dim", True),)
for _call in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
    row(_call.__name__, _call, dims.rowwise, shapes.along, DENSE, attrs=_ALONG, is_single=False)
for _name in ("cummax", "cummin"):
    row(_name, calls.running(_name), dims.ranked, shapes.ranked, DENSE, attrs=_ALONG, results=2,
        is_single=False)  # fmt: skip
row("flip", lambda x, *, dims: torch.flip(x, dims), dims.flip, shapes.flipped, ANYHOW,
    attrs=(attr("dims", "dims", True),), is_single=False)  # fmt: skip
