"""The op table: one row per op says what torch call runs it and how its dims correspond."""

from __future__ import annotations

from mdfuse.ir.op_table import ELEMENTWISE as ELEMENTWISE
from mdfuse.ir.op_table import TABLE as TABLE
from mdfuse.ir.op_table import Op as Op
from mdfuse.ir.op_table import local_attrs as local_attrs
from mdfuse.ir.rows import (
    composite,
    creations,
    indexing,
    linear_algebra,
    pointwise,
    ragged,
    reductions,
    spatial,
    views,
)
from mdfuse.ir.rows.views import itself as itself

#: The modules that fill `TABLE` when they are imported.
FAMILIES = (
    views, pointwise, reductions, composite, indexing, spatial, linear_algebra, creations, ragged,
)  # fmt: skip
