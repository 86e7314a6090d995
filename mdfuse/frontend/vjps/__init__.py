"""Rules of gradients, one per row of the op table, or the reason why there is none."""

from mdfuse.frontend.vjps import (
    attention,
    complex,
    composite,
    indexing,
    matrices,
    pointwise,
    reductions,
    shapes,
    spatial,
    updates,
)
from mdfuse.frontend.vjps.complex import COMPLEX as COMPLEX
from mdfuse.frontend.vjps.table import NO_GRADIENT as NO_GRADIENT
from mdfuse.frontend.vjps.table import RULES as RULES
from mdfuse.frontend.vjps.table import STEPS as STEPS

#: The modules that fill `RULES` when they are imported.
FAMILIES = (
    shapes, pointwise, reductions, composite, attention, indexing, updates, spatial, matrices,
    complex,
)  # fmt: skip
