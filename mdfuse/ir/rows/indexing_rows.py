"""Lookups by tensors of indices, and their transposes; writes of a few elements of a value."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import element_writes as writes
from mdfuse.ir import gather_scatter as lookups
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import attr, word
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import DENSE, exact
from mdfuse.ir.rows.view_rows import WINDOW

_DIM, _PART = attr("along", "place", True), attr("part", "part", is_local=True)
_MADE = (attr("shape", "shape", True), attr("box", "box", is_local=True))
_LOOKUP: dict[str, Any] = {
    "operands": (2, 2), "indexed": 1, "attrs": (_DIM, _PART), "localize": lookups.local_part,
    "is_single": False, "partial": "view",
}  # fmt: skip
_MAKING: dict[str, Any] = {
    "operands": (2, 2), "indexed": "result", "localize": of_part.local_draw, "is_single": False,
    "partial": "reduce",
}  # fmt: skip

row("index_select", lookups.select, lookups.of_select, lookups.shape_of_select, DENSE,
    **_LOOKUP)  # fmt: skip
row("gather", lookups.gather, lookups.of_gather, lookups.shape_of_gather, DENSE,
    **_LOOKUP)  # fmt: skip
row("index_sum", lookups.select_grad, lookups.of_select_grad, lookups.shape_of_made, DENSE,
    attrs=(_DIM, *_MADE), **_MAKING)  # fmt: skip
row("scatter_reduce", lookups.scatter, lookups.of_scatter, lookups.shape_of_made, DENSE,
    attrs=(_DIM, word("reduce", "sum", "prod", "max", "min", required=True), *_MADE),
    **_MAKING)  # fmt: skip


# -- writes of a few elements ----------------------------------------------------------------------


_ALONG, _PART = attr("along", "place", True), attr("part", "part", is_local=True)
_DROPS = attr("drops", "bool")
_INDEXED: dict[str, Any] = {
    "operands": (3, 3), "indexed": -1, "keeps": -1, "attrs": (_ALONG, _DROPS, _PART),
    "localize": lookups.local_part,
}  # fmt: skip

row("index_copy", writes.copy, writes.of_copy, writes.shape_of_copy, exact(writes.copy),
    **_INDEXED)  # fmt: skip
row("scatter", writes.scatter, writes.of_scatter, writes.shape_of_scatter,
    exact(writes.scatter), **_INDEXED)  # fmt: skip
row(
    "index_put",
    writes.put,
    writes.of_put,
    writes.shape_of_put,
    exact(writes.put),
    operands=(3, None),
    indexed=-1,
    keeps=-1,
    attrs=(
        attr("dims", "dims", True, of="result"),
        attr("accumulate", "bool"),
        _DROPS,
        attr("box", "box", is_local=True),
        attr("extents", "counts", is_local=True),
    ),
    localize=writes.local_box,
)
row(
    "slice_scatter",
    writes.write_window,
    writes.of_window,
    writes.shape_of_window,
    exact(writes.write_window),
    operands=(2, 2),
    keeps=-1,
    few=lambda source, x, **attrs: x.clone(),  # few elements are not where the window is
    attrs=(
        WINDOW[0],
        WINDOW[2],
        attr("taken", "box", is_local=True),
        attr("at", "places", is_local=True),
    ),
    localize=writes.local_window,
)
