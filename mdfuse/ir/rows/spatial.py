"""Convolutions, pooling and contractions."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import contraction, spatial
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW

_SETTINGS = tuple(attr(name, "counts", True) for name in ("stride", "padding", "dilation"))
_GROUPS, _AROUND = attr("groups", "count"), attr("around", "numbers", is_local=True)
_MADE = (attr("shape", "shape", True), attr("box", "box", is_local=True))
_KERNEL = attr("kernel", "counts", True)
_LIBRARY: dict[str, Any] = {"is_library": True, "is_single": False}
row(
    "convolution",
    spatial.convolve,
    spatial.of_convolution,
    spatial.shape_of_convolution,
    ANYHOW,
    few=spatial.few_convolved,
    operands=(2, 2),
    attrs=(
        *_SETTINGS, _GROUPS, attr("transposed", "bool"), attr("more", "counts"),
        attr("here", "count", is_local=True), _AROUND,
    ),
    localize=spatial.local_convolution,
    **_LIBRARY,
)  # fmt: skip
row(
    "convolution_weight",
    spatial.convolve_weight,
    spatial.of_convolution_weight,
    spatial.shape_of_convolution_weight,
    ANYHOW,
    few=spatial.few_convolved_weight,
    operands=(2, 2),
    attrs=(*_SETTINGS, _GROUPS, _AROUND, *_MADE),
    localize=spatial.local_convolution_weight,
    **_LIBRARY,
)
row(
    "max_pool",
    spatial.max_pool,
    spatial.of_pool,
    spatial.shape_of_pool,
    ANYHOW,
    few=spatial.few_pooled,
    results=2,
    attrs=(
        _KERNEL, *_SETTINGS, attr("ceil", "bool"), _AROUND,
        attr("begins", "counts", is_local=True), attr("extents", "counts", is_local=True),
    ),
    localize=spatial.local_pool,
    **_LIBRARY,
)  # fmt: skip
row(
    "max_pool_grad",
    spatial.max_pool_grad,
    spatial.of_pool_grad,
    spatial.shape_of_pool_grad,
    ANYHOW,
    few=spatial.few_pooled_grad,
    operands=(2, 2),
    attrs=(_KERNEL, *_SETTINGS, attr("ceil", "bool"), *_MADE),
    localize=of_part.local_draw,
    **_LIBRARY,
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
