"""Ops along a dim that is whole: running sums and extremes, dims turned round."""

from __future__ import annotations

import torch

from mdfuse.ir import calls, dims, shapes
from mdfuse.ir.attributes import attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW, DENSE

_ALONG = (attr("dim", "dim", True),)
for _call in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
    row(_call.__name__, _call, dims.rowwise, shapes.along, DENSE, attrs=_ALONG, is_single=False)
for _name in ("cummax", "cummin"):
    row(
        _name,
        calls.running(_name),
        dims.ranked,
        shapes.ranked,
        DENSE,
        attrs=_ALONG,
        results=2,
        is_single=False,
    )
row("flip", lambda x, *, dims: torch.flip(x, dims), dims.flip, shapes.flipped, ANYHOW,
    attrs=(attr("dims", "dims", True),), is_single=False)  # fmt: skip
