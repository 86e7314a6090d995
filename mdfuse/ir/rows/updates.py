"""Writes of a few elements of a value."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import indexing, updates
from mdfuse.ir.attributes import attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import exact
from mdfuse.ir.rows.views import WINDOW

_ALONG, _PART = attr("along", "place", True), attr("part", "part", is_local=True)
_DROPS = attr("drops", "bool")
_INDEXED: dict[str, Any] = {
    "operands": (3, 3), "indexed": -1, "keeps": -1, "attrs": (_ALONG, _DROPS, _PART),
    "localize": indexing.local_part,
}  # fmt: skip

row("index_copy", updates.copy, updates.of_copy, updates.shape_of_copy, exact(updates.copy),
    **_INDEXED)  # fmt: skip
row("scatter", updates.scatter, updates.of_scatter, updates.shape_of_scatter,
    exact(updates.scatter), **_INDEXED)  # fmt: skip
row(
    "index_put",
    updates.put,
    updates.of_put,
    updates.shape_of_put,
    exact(updates.put),
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
    localize=updates.local_box,
)
row(
    "slice_scatter",
    updates.write_window,
    updates.of_window,
    updates.shape_of_window,
    exact(updates.write_window),
    operands=(2, 2),
    keeps=-1,
    few=lambda source, x, **attrs: x.clone(),  # few elements are not where the window is
    attrs=(
        WINDOW[0],
        WINDOW[2],
        attr("taken", "box", is_local=True),
        attr("at", "places", is_local=True),
    ),
    localize=updates.local_window,
)
