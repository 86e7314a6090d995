"""Views: ops that move no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mdfuse.ir import calls, dims, shapes, shifts
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import attr
from mdfuse.ir.op_table import row
from mdfuse.ir.out_forms import ANYHOW


def itself(x: Any) -> Any:
    """Return the operand as it is: a set computes nothing."""
    return x


def _view(
    name: str, call: Callable[..., Any], rule: dims.Rule, shape: shapes.ShapeRule, **fields: Any
) -> None:
    """Add the row of a view, which takes any Partial operand as it is."""
    row(name, call, rule, shape, ANYHOW, is_view=True, partial="view", **fields)


_ORDER = attr("order", "permutation", True)
_DIMS = attr("dims", "permutation", True)
_NEW, _GONE = attr("dims", "dims", True, of="result"), attr("dims", "dims", True)
_SHAPE: dict[str, Any] = {
    "localize": of_part.local_shape,
    "globalize": of_part.whole_shape,
    "attrs": (attr("shape", "shape", True),),
}
WINDOW = (
    attr("starts", "places", True),
    attr("ends", "places", True),
    attr("steps", "steps", True),
)
_view("set", itself, dims.pointwise, shapes.first)
_view("detach", itself, dims.pointwise, shapes.first, host="set")
_view("stride_order", calls.in_order, dims.pointwise, shapes.first, host="set", attrs=(_ORDER,),
      may_copy=True)  # fmt: skip
_view("permute", lambda x, *, dims: x.permute(dims), dims.permute, shapes.permute, attrs=(_DIMS,))
_view("reshape", lambda x, *, shape: x.reshape(shape), dims.reshape, shapes.reshape, may_copy=True,
      **_SHAPE)  # fmt: skip
_view("expand", lambda x, *, shape: x.expand(shape), dims.expand, shapes.expand, **_SHAPE)
_view("unsqueeze", calls.unsqueeze, dims.unsqueeze, shapes.unsqueeze, attrs=(_NEW,))
_view("squeeze", calls.squeeze, dims.squeeze, shapes.squeeze, localize=of_part.local_squeeze,
      attrs=(_GONE,))  # fmt: skip
_view("slice", calls.window, shifts.sliced, shapes.window, localize=of_part.local_ends,
      globalize=of_part.whole_ends, attrs=WINDOW)  # fmt: skip
