"""Ops that make numbers: tensors of numbers, draws, zeros with something put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mdfuse.ir import calls, creation, dims, shapes, shifts
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import Attr, attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW, DENSE

_COMPOSITE: dict[str, Any] = {"is_single": False}
_STREAM, _BOX = attr("stream", "int", True), attr("box", "box", is_local=True)
_EXTENTS, _DTYPE = attr("shape", "shape", True), attr("dtype", "dtype", True)


def _creation(
    name: str,
    call: Callable[..., Any],
    operands: int,
    *attrs: Attr,
    shape: shapes.ShapeRule = shapes.created,
    **fields: Any,
) -> None:
    """Add the row of an op that makes a tensor of numbers; each rank makes its own rows of it."""
    fields |= {"localize": of_part.local_runs, "operands": (operands, operands), "is_plain": True}
    row(name, call, dims.creation, shape, ANYHOW, attrs=(_EXTENTS, *attrs, _BOX), **fields)


_VALUES = attr("values", "numbers", True)
_RANGE = (attr("low", "number"), attr("high", "number"))
_creation(
    "uniform", creation.uniform, 1, attr("dtype", "drawn", True), *_RANGE, _STREAM, **_COMPOSITE
)
_creation("full", creation.full, 1, _DTYPE)
_creation("arange", creation.arange, 2, _DTYPE, shape=shapes.numbered)
_creation("constant", creation.constant, 0, _VALUES, _DTYPE, shape=shapes.listed)
row("embedding_grad", calls.lookup_grad, dims.embedding_grad, shapes.embedding_grad, DENSE,
    localize=of_part.local_draw, operands=(2, 2), attrs=(_EXTENTS, _BOX), is_in_order=True,
    **_COMPOSITE)  # fmt: skip
row(
    "slice_grad",
    calls.window_grad,
    shifts.put_into_zeros,
    shapes.window_grad,
    DENSE,
    localize=of_part.local_taken,
    attrs=(
        _EXTENTS,
        attr("starts", "places", True),
        attr("steps", "steps", True),
        _BOX,
        attr("taken", "box", is_local=True),
        attr("at", "places", is_local=True),
    ),
    **_COMPOSITE,
)
row("full_like", creation.full_like, dims.likeness, shapes.first, ANYHOW, operands=(2, 2),
    attrs=(_DTYPE,))  # fmt: skip
row("dropout", creation.dropout, dims.pointwise, shapes.first, ANYHOW, localize=of_part.local_runs,
    operands=(2, 2),
    attrs=(attr("p", "probability", True), _STREAM, attr("shape", "shape", is_local=True), _BOX),
    **_COMPOSITE)  # fmt: skip
