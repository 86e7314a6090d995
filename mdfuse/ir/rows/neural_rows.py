"""Contractions, lookups, and ops of neural networks that are one call of torch."""

from __future__ import annotations

from typing import Any

import torch

from mdfuse.ir import (
    attention,
    attention_dims,
    attention_halos,
    calls,
    dims,
    out_forms,
    paged,
    shapes,
    shifts,
)
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import attr, word
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW, DENSE, exact, product, rounded
from mdfuse.ir.rows.view_rows import WINDOW

_F = torch.nn.functional

_COMPOSITE: dict[str, Any] = {"is_single": False}
_ALONG: dict[str, Any] = {"attrs": (attr("dim", "dim", True),), **_COMPOSITE}
row("matmul", torch.matmul, dims.matmul, shapes.matmul, product(out_forms.matmul), stays=1,
    is_library=True, operands=(2, 2))  # fmt: skip
row("linear", lambda x, w, b=None: _F.linear(x, w, b), dims.linear, shapes.linear,
    product(out_forms.linear), stays=1, is_library=True, operands=(2, 3))  # fmt: skip
row(
    "embedding",
    calls.lookup,
    dims.embedding,
    shapes.embedding,
    DENSE,
    localize=of_part.local_rows,
    indexed=1,
    operands=(2, 2),
    attrs=(
        attr("padding_idx", "extent"),
        attr("scale_grad_by_freq", "bool"),
        attr("part", "part", is_local=True),
    ),
    **_COMPOSITE,
)
row(
    "window",
    calls.joined_window,
    dims.window_of_parts,
    shapes.window,
    ANYHOW,
    localize=of_part.local_places,
    globalize=of_part.whole_places,
    partial="reduce",
    attrs=(
        word("reduce", "sum", "bor", required=True),
        *WINDOW,
        attr("places", "box", is_local=True),
        attr("shape", "shape", is_local=True),
    ),
    **_COMPOSITE,
)
_call: Any
for _call in (torch.softmax, torch.log_softmax):
    row(_call.__name__, _call, dims.rowwise, shapes.along, rounded(_call), **_ALONG)
_RANKED: dict[str, Any] = {"results": 2, "is_library": True, **_COMPOSITE}
_DIM = attr("dim", "dim", True)
for _name, _call, *_own in (
    ("topk", calls.top, attr("k", "extent", True), _DIM, attr("smallest", "bool")),
    ("sort", calls.sort, _DIM, attr("descending", "bool"), attr("stable", "bool")),
):
    row(_name, _call, dims.ranked, shapes.ranked, DENSE, attrs=tuple(_own), **_RANKED)
row("layer_norm", calls.normalize, dims.layer_norm, shapes.layer_norm, DENSE, operands=(3, 3),
    attrs=(attr("normalized_shape", "shape", True), attr("eps", "number", True)),
    **_COMPOSITE)  # fmt: skip
_ATTEND = (
    attr("is_causal", "bool"),
    attr("scale", "number"),
    attr("enable_gqa", "bool"),
    attr("window", "count"),
    attr("q_offset", "index"),
    attr("k_offset", "index"),
    attr("rows", "box", is_local=True),
    attr("keys", "box", is_local=True),
)
row("rms_norm", calls.root_mean_square_normalize, dims.layer_norm, shapes.layer_norm, DENSE,
    operands=(2, 2), attrs=(attr("normalized_shape", "shape", True), attr("eps", "number", True)),
    **_COMPOSITE)  # fmt: skip
row("scaled_dot_product_attention", calls.attend, attention_dims.attention, shapes.attention,
    ANYHOW, host="attention", localize=of_part.local_positions, globalize=of_part.whole_positions,
    is_library=True, is_plain=True, operands=(3, 5), attrs=_ATTEND, **_COMPOSITE)  # fmt: skip
for _name, _call, _rule, _shape, _counts in (
    ("attention", attention.attend, attention_dims.attended, shapes.attended, (2, 3, 5)),
    (
        "attention_grad",
        attention.attend_grad,
        attention_dims.attention_grad,
        shapes.attention_grad,
        (3, 6, 8),
    ),
):
    _more: dict[str, Any] = {"results": _counts[0], "operands": _counts[1:], "is_library": True}
    _more |= {"is_plain": True, "localize": of_part.local_positions}
    _more["globalize"] = of_part.whole_positions
    row(_name, _call, _rule, _shape, ANYHOW, attrs=_ATTEND, **_more, **_COMPOSITE)
row("paged_attention", paged.attend, paged.labels, paged.shape, ANYHOW, is_library=True,
    is_plain=True, operands=(5, 5), attrs=(attr("scale", "number"),), **_COMPOSITE)  # fmt: skip
row("attention_parts", attention.attend_parts, attention_dims.attention_parts,
    shapes.attention_parts, ANYHOW, localize=of_part.local_parts, globalize=of_part.whole_parts,
    results=2, operands=(3, 5), is_library=True, is_plain=True,
    attrs=(*_ATTEND, attr("parts", "extent", True)), **_COMPOSITE)  # fmt: skip
row(
    "attention_halo_grad",
    attention_halos.attend_grad_in_parts,
    attention_halos.grad_labels,
    attention_halos.grad_shapes,
    ANYHOW,
    localize=of_part.local_parts,
    globalize=of_part.whole_parts,
    results=5,
    operands=(6, 6),
    is_library=True,
    is_plain=True,
    attrs=(
        *_ATTEND,
        attr("parts", "extent", True),
        attr("chunk", "count", True),
        attr("halo", "extent", True),
    ),
    **_COMPOSITE,
)
row("add_halos", attention_halos.add_halos, attention_halos.halo_labels, attention_halos.halo_shape,
    ANYHOW, localize=attention_halos.local_halos, operands=(2, None),
    attrs=(attr("chunk", "count", True), attr("starts", "counts", is_local=True)),
    **_COMPOSITE)  # fmt: skip
row("attention_terms", attention.attend_terms, attention_dims.attention_terms,
    shapes.attention_terms, ANYHOW, localize=of_part.local_positions,
    globalize=of_part.whole_positions, operands=(3, 5), is_library=True, is_plain=True,
    attrs=_ATTEND, **_COMPOSITE)  # fmt: skip
row("cat", calls.cat, shifts.joined, shapes.cat, exact(calls.cat), operands=(1, None),
    partial="all", **_ALONG)  # fmt: skip
