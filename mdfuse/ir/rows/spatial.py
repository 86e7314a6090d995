"""Convolutions, pooling and contractions."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import contraction, spatial
from mdfuse.ir.attributes import attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW

_SETTINGS = tuple(attr(name, "counts", True) for name in ("stride", "padding", "dilation"))
_CONVOLUTION: dict[str, Any] = {
    "attrs": (
        *_SETTINGS, attr("groups", "count"), attr("transposed", "bool"), attr("more", "counts"),
        attr("here", "count", is_local=True),
    ),
    "localize": spatial.local_groups,
    "is_library": True,
    "is_single": False,
}  # fmt: skip
row(
    "convolution",
    spatial.convolve,
    spatial.of_convolution,
    spatial.shape_of_convolution,
    ANYHOW,
    few=spatial.few_convolved,
    operands=(2, 2),
    **_CONVOLUTION,
)
row(
    "convolution_grad",
    spatial.convolve_grad,
    spatial.of_convolution_grad,
    spatial.shape_of_convolution_grad,
    ANYHOW,
    few=spatial.few_convolved_grad,
    operands=(3, 3),
    results=2,
    **_CONVOLUTION,
)
row(
    "max_pool",
    spatial.max_pool,
    spatial.of_pool,
    spatial.shape_of_pool,
    ANYHOW,
    few=spatial.few_pooled,
    results=2,
    attrs=(attr("kernel", "counts", True), *_SETTINGS, attr("ceil", "bool")),
    is_library=True,
    is_single=False,
)
row(
    "contract",
    contraction.contract,
    contraction.of_contraction,
    contraction.shape_of_contraction,
    ANYHOW,
    operands=(2, 2),
    attrs=tuple(attr(name, "labels", True) for name in ("left", "right", "kept")),
    is_library=True,
    is_single=False,
)
