"""The op table: one row per op says what torch call runs it and how its dims correspond."""

from __future__ import annotations

from mdfuse.ir.op_table import ELEMENTWISE as ELEMENTWISE
from mdfuse.ir.op_table import TABLE as TABLE
from mdfuse.ir.op_table import Op as Op
from mdfuse.ir.op_table import local_attrs as local_attrs
from mdfuse.ir.rows import (
    creation_rows,
    indexing_rows,
    linear_algebra_rows,
    neural_rows,
    pointwise_rows,
    ragged_rows,
    reduction_rows,
    spatial_rows,
    view_rows,
)
from mdfuse.ir.rows.view_rows import itself as itself

#: The modules that fill `TABLE` when they are imported.
FAMILIES = (
    view_rows, pointwise_rows, reduction_rows, neural_rows, indexing_rows, spatial_rows,
    linear_algebra_rows, creation_rows, ragged_rows,
)  # fmt: skip
