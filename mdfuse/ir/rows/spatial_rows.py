"""Convolutions, pooling and contractions."""

from __future__ import annotations

from typing import Any

from mdfuse.ir import contraction, convolution, pooling
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW

_SETTINGS = tuple(attr(name, "counts", True) for name in ("stride", "padding", "dilation"))
_GROUPS, _AROUND = attr("groups", "count"), attr("around", "numbers", is_local=True)
_MADE = (attr("shape", "shape", True), attr("box", "box", is_local=True))
_KERNEL = attr("kernel", "counts", True)
_LIBRARY: dict[str, Any] = {"is_library": True}
row(
    "convolution",
    convolution.convolve,
    convolution.of_convolution,
    convolution.shape_of_convolution,
    ANYHOW,
    few=convolution.few_convolved,
    operands=(2, 2),
    attrs=(
        *_SETTINGS, _GROUPS, attr("transposed", "bool"), attr("more", "counts"),
        attr("here", "count", is_local=True), _AROUND,
    ),
    localize=convolution.local_convolution,
    **_LIBRARY,
)  # fmt: skip
row("convolution_weight", convolution.convolve_weight, convolution.of_convolution_weight,
    convolution.shape_of_convolution_weight, ANYHOW, few=convolution.few_convolved_weight,
    operands=(2, 2), attrs=(*_SETTINGS, _GROUPS, _AROUND, *_MADE),
    localize=convolution.local_convolution_weight, **_LIBRARY)  # fmt: skip
row(
    "max_pool",
    pooling.max_pool,
    pooling.of_pool,
    pooling.shape_of_pool,
    ANYHOW,
    few=pooling.few_pooled,
    results=2,
    attrs=(
        _KERNEL, *_SETTINGS, attr("ceil", "bool"), _AROUND,
        attr("begins", "counts", is_local=True), attr("extents", "counts", is_local=True),
    ),
    localize=pooling.local_pool,
    **_LIBRARY,
)  # fmt: skip
row("max_pool_grad", pooling.max_pool_grad, pooling.of_pool_grad, pooling.shape_of_pool_grad,
    ANYHOW, few=pooling.few_pooled_grad, operands=(2, 2),
    attrs=(_KERNEL, *_SETTINGS, attr("ceil", "bool"), *_MADE), localize=of_part.local_draw,
    **_LIBRARY)  # fmt: skip
row(
    "mean_pool",
    pooling.mean_pool,
    pooling.of_mean,
    pooling.shape_of_mean,
    ANYHOW,
    few=pooling.few_means,
    attrs=(
        _KERNEL, *_SETTINGS[:2], attr("made", "counts", True), attr("divisor", "int", True),
        attr("transposed", "bool"), _AROUND,
    ),
    localize=pooling.local_mean,
    partial="factor",
    **_LIBRARY,
)  # fmt: skip
row("contract", contraction.contract, contraction.of_contraction, contraction.shape_of_contraction,
    ANYHOW, operands=(2, 2),
    attrs=tuple(attr(name, "labels", True) for name in ("left", "right", "kept")), is_library=True,
    is_single=False)  # fmt: skip
