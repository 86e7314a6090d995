"""Lookups by tensors of indices, and their transposes."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import indexing
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import attr, word
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import DENSE

_DIM, _PART = attr("along", "place", True), attr("part", "part", is_local=True)
_MADE = (attr("shape", "shape", True), attr("box", "box", is_local=True))
_LOOKUP: dict[str, Any] = {
    "operands": (2, 2), "indexed": 1, "attrs": (_DIM, _PART), "localize": indexing.local_part,
    "is_single": False, "partial": "view",
}  # fmt: skip
_MAKING: dict[str, Any] = {
    "operands": (2, 2), "indexed": "result", "localize": of_part.local_draw, "is_single": False,
    "partial": "reduce",
}  # fmt: skip

row("index_select", indexing.select, indexing.of_select, indexing.shape_of_select, DENSE,
    **_LOOKUP)  # fmt: skip
row("gather", indexing.gather, indexing.of_gather, indexing.shape_of_gather, DENSE, **_LOOKUP)
row("index_sum", indexing.select_grad, indexing.of_select_grad, indexing.shape_of_made, DENSE,
    attrs=(_DIM, *_MADE), **_MAKING)  # fmt: skip
row(
    "scatter_reduce",
    indexing.scatter,
    indexing.of_scatter,
    indexing.shape_of_made,
    DENSE,
    attrs=(_DIM, word("reduce", "sum", "prod", "max", "min", required=True), *_MADE),
    **_MAKING,
)
