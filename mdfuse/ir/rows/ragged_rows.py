"""Rows grouped by expert, of which a run counts how many are there."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import ragged, ragged_dims
from mdfuse.ir.attributes import attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW, DENSE

_SIZES = (attr("sizes", "counts"),)
_HERE = (*_SIZES, *(attr(name, "part", is_local=True) for name in ("rows", "part")))
_GROUPS: dict[str, Any] = {"localize": ragged.local_groups, "is_single": False}
_BOUND = attr("bound", "count"), attr("capacity", "extent")
_ROWS: dict[str, Any] = {
    "localize": ragged.local_rows, "globalize": ragged.whole_rows, "is_single": False,
    "attrs": (*_HERE, *_BOUND),
}  # fmt: skip
row("counts", ragged.count, ragged_dims.of_count, ragged.shape_of_count, DENSE,
    attrs=(attr("experts", "count", True), attr("parts", "count", True), *_HERE),
    **_GROUPS)  # fmt: skip
row("group_rows", ragged.group, ragged_dims.of_group, ragged.shape_of_group, DENSE, operands=(3, 4),
    **_ROWS)  # fmt: skip
row("ungroup_rows", ragged.ungroup, ragged_dims.of_ungroup, ragged.shape_of_ungroup, DENSE,
    operands=(3, 4), partial="scale", attrs=_HERE, **_GROUPS)  # fmt: skip
row("line_up_rows", ragged.line_up, ragged_dims.of_line_up, ragged.shape_of_line_up, DENSE,
    operands=(3, 4), **_ROWS)  # fmt: skip
row("put_back_rows", ragged.put_back, ragged_dims.of_put_back, ragged.shape_of_put_back, DENSE,
    operands=(3, 4), partial="scale", attrs=_HERE, **_GROUPS)  # fmt: skip
_ORDER = attr("by_expert", "bool")
row("row_places", ragged.places, ragged_dims.of_places, ragged.shape_of_places, DENSE,
    operands=(2, 2), attrs=_HERE, **_GROUPS)  # fmt: skip
_PRODUCT: dict[str, Any] = {
    "operands": (3, 3), "is_library": True, "is_single": False, "attrs": (_ORDER,),
}  # fmt: skip
row("rows_mm", ragged.multiply, ragged_dims.of_multiply, ragged.shape_of_multiply, DENSE, stays=1,
    **_PRODUCT)  # fmt: skip
row("rows_mm_grad", ragged.multiply_grad, ragged_dims.of_multiply_grad,
    ragged.shape_of_multiply_grad, DENSE, **_PRODUCT)  # fmt: skip
row("sum_of_rows", ragged.total, ragged_dims.of_total, ragged.shape_of_total, DENSE,
    operands=(2, 2), attrs=(_ORDER,))  # fmt: skip
row("spread_rows", ragged.spread, ragged_dims.of_spread, ragged.shape_of_spread, DENSE,
    operands=(3, 3), attrs=(_ORDER,))  # fmt: skip
for _name, _call in (("rows_to_experts", ragged.to_experts), ("rows_to_parts", ragged.to_parts)):
    row(_name, _call, ragged_dims.of_mask, ragged.shape_of_mask, ANYHOW, operands=(2, 2),
        is_view=True, may_copy=True, is_library=True, is_single=False, partial="scale")  # fmt: skip
row(
    "mask_rows",
    ragged.mask,
    ragged_dims.of_mask,
    ragged.shape_of_mask,
    ANYHOW,
    operands=(2, 2),
    is_view=True,  # the rows that are there are all rows
    may_copy=True,
)
