"""The operations of `fd.ops` and `mf.ops`, with the arguments that a torch user expects.

Every function takes handles (and numbers where torch takes numbers) and records one expression, or
a few where an operation is made of others. The result is always a value of its own, so that placing
it with `.on()` never places an operand. `docs/operations.md` lists them all.
"""

from __future__ import annotations

from mdfuse.frontend import methods
from mdfuse.frontend.hints import hint_for
from mdfuse.frontend.kinds import taking_kinds
from mdfuse.frontend.methods import UnknownOperation as UnknownOperation
from mdfuse.frontend.ops import (
    creations,
    draws,
    extremes,
    indexing,
    neural,
    pointwise,
    products,
    reductions,
    views,
)
from mdfuse.frontend.ops.indexing import index as index
from mdfuse.frontend.ops.recording import Operation
from mdfuse.frontend.ops.recording import current as current
from mdfuse.frontend.ops.views import stride_order as stride_order

_MODULES = (views, indexing, pointwise, extremes, reductions, products, neural, draws, creations)

#: other name -> operation.
ALIASES = {
    "view": "reshape", "view_as": "reshape_as", "ravel": "flatten", "broadcast_to": "expand",
    "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim", "concat": "cat",
    "concatenate": "cat", "clone": "set", "detach": "set", "mod": "remainder",
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "negative": "neg", "absolute": "abs", "fix": "trunc", "clip": "clamp", "not_equal": "ne",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
}  # fmt: skip

#: Every operation by name.
BY_NAME: dict[str, Operation] = {
    **{name: taking_kinds(f, elementwise=True) for name, f in pointwise.ROWS.items()},
    **{f.__name__: taking_kinds(f) for module in _MODULES for f in module.SPELLED},
}
BY_NAME |= {alias: BY_NAME[name] for alias, name in ALIASES.items()}
globals().update(BY_NAME)
methods.fill({**BY_NAME, "index": index, "as_dtype": pointwise.as_dtype})


def __getattr__(name: str) -> Operation:
    raise UnknownOperation(f"there is no operation {name!r}", hint=hint_for(name))
