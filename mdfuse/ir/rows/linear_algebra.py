"""Inverses, solutions and factors of matrices."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import linear_algebra
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW

_LIBRARY: dict[str, Any] = {"is_library": True, "is_single": False}
for _call in (linear_algebra.inverse, linear_algebra.cholesky):
    row(
        _call.__name__,
        _call,
        linear_algebra.of_matrices,
        linear_algebra.shape_of_matrices,
        ANYHOW,
        **_LIBRARY,
    )
row("solve", linear_algebra.solve, linear_algebra.of_solution, linear_algebra.shape_of_solution,
    ANYHOW, operands=(2, 2), **_LIBRARY)  # fmt: skip
