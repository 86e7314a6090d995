"""Rules of gradients, one per row of the op table, or the reason why there is none."""

from mdfuse.frontend.vjps import (
    attention_vjps,
    complex_vjps,
    indexing_vjps,
    matrix_vjps,
    neural_vjps,
    pointwise_vjps,
    reduction_vjps,
    spatial_vjps,
    update_vjps,
    view_vjps,
)
from mdfuse.frontend.vjps.complex_vjps import COMPLEX as COMPLEX
from mdfuse.frontend.vjps.table import NO_GRADIENT as NO_GRADIENT
from mdfuse.frontend.vjps.table import RULES as RULES
from mdfuse.frontend.vjps.table import STEPS as STEPS

#: The modules that fill `RULES` when they are imported.
FAMILIES = (
    view_vjps, pointwise_vjps, reduction_vjps, neural_vjps, attention_vjps, indexing_vjps,
    update_vjps, spatial_vjps, matrix_vjps, complex_vjps,
)  # fmt: skip
