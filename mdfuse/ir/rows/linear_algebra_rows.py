"""Inverses, solutions and factors of matrices; products of rows with a matrix each."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import groups, linear_algebra, routes
from mdfuse.ir.attributes import attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW, DENSE

_LIBRARY: dict[str, Any] = {"is_library": True, "is_single": False}
for _call in (linear_algebra.inverse, linear_algebra.cholesky):
    row(_call.__name__, _call, linear_algebra.of_matrices, linear_algebra.shape_of_matrices, ANYHOW,
        **_LIBRARY)  # fmt: skip
row("solve", linear_algebra.solve, linear_algebra.of_solution, linear_algebra.shape_of_solution,
    ANYHOW, operands=(2, 2), **_LIBRARY)  # fmt: skip

# Products of rows with a matrix each: of groups, or by the number that each row has.
_HERE = tuple(attr(name, "part", is_local=True) for name in ("rows", "part"))
_GROUPS: dict[str, Any] = {
    "operands": (3, 3), "localize": groups.local_groups, "is_library": True, "is_single": False,
}  # fmt: skip
row("grouped_mm", groups.multiply, groups.of_groups, groups.shape_of_groups, DENSE, attrs=_HERE,
    **_GROUPS)  # fmt: skip
row("grouped_mm_grad", groups.multiply_grad, groups.of_groups_grad, groups.shape_of_groups_grad,
    DENSE, attrs=(attr("shape", "shape", True), *_HERE), **_GROUPS)  # fmt: skip
_PART = attr("part", "part", is_local=True)
_ROUTES: dict[str, Any] = {**_GROUPS, "localize": routes.local_parts}
row("routed_mm", routes.multiply, routes.labels, routes.shape, DENSE, attrs=(_PART,),
    **_ROUTES)  # fmt: skip
row("routed_mm_grad", routes.multiply_grad, routes.labels_of_grad, routes.shape_of_grad, DENSE,
    attrs=(attr("shape", "shape", True), _PART), **_ROUTES)  # fmt: skip
