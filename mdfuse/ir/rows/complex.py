"""Complex numbers: parts, and pairs of real numbers as one."""

from __future__ import annotations

from typing import Any

import torch

from mdfuse.ir import dims, shapes
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW

_ONE: dict[str, Any] = {"host": "unary"}
row("conj", torch.conj_physical, dims.pointwise, shapes.first, ANYHOW, **_ONE)
row("real", lambda x: torch.real(x).clone(), dims.pointwise, shapes.first, ANYHOW, **_ONE)
row("imag", lambda x: torch.imag(x).clone(), dims.pointwise, shapes.first, ANYHOW, **_ONE)
row("angle", torch.angle, dims.pointwise, shapes.first, ANYHOW, **_ONE)
for _call in (torch.complex, torch.polar):
    row(
        _call.__name__,
        _call,
        dims.pointwise,
        shapes.broadcast,
        ANYHOW,
        host="binary",
        operands=(2, 2),
    )
row("view_as_complex", lambda x: torch.view_as_complex(x.contiguous()).clone(), dims.without_last,
    shapes.without_last, ANYHOW, is_single=False)  # fmt: skip
row("view_as_real", lambda x: torch.view_as_real(x).clone(), dims.with_last, shapes.with_last,
    ANYHOW, is_single=False)  # fmt: skip
