"""The op table: one row per op says what torch call runs it and how its dims correspond."""

from __future__ import annotations

from mdfuse.ir.op_table import ELEMENTWISE as ELEMENTWISE
from mdfuse.ir.op_table import TABLE as TABLE
from mdfuse.ir.op_table import Op as Op
from mdfuse.ir.op_table import local_attrs as local_attrs
from mdfuse.ir.rows import (
    complex,
    composite,
    creations,
    groups,
    indexing,
    linear_algebra,
    pointwise,
    reductions,
    scans,
    spatial,
    updates,
    views,
)
from mdfuse.ir.rows.views import itself as itself

#: The modules that fill `TABLE` when they are imported.
FAMILIES = (
    views, pointwise, reductions, composite, scans, indexing, updates, spatial, linear_algebra,
    complex, groups, creations,
)  # fmt: skip
