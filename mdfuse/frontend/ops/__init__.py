"""The operations of `fd.ops` and `mf.ops`, with the arguments that a torch user expects.

Every function takes handles (and numbers where torch takes numbers) and records one expression, or
several for composed operations. The result is always a new value, so that placing it with `.on()`
never places an operand. `docs/operations.md` lists them all.
"""

from __future__ import annotations

from inspect import isfunction
from types import ModuleType

from mdfuse.frontend import methods
from mdfuse.frontend.argument_kinds import taking_kinds as _taking_kinds
from mdfuse.frontend.hints import hint_for
from mdfuse.frontend.methods import UnknownOperation as UnknownOperation
from mdfuse.frontend.ops import (
    cells,
    convolutions,
    creations,
    distances,
    draws,
    einsums,
    expert_rows,
    extremes,
    joining,
    lookups,
    losses,
    masks,
    matrices,
    moves,
    neural,
    norms,
    parts,
    pointwise,
    products,
    reductions,
    resampling,
    scans,
    special,
    updates,
    views,
)
from mdfuse.frontend.ops.recording import Operation
from mdfuse.frontend.ops.recording import as_dtype as _as_dtype
from mdfuse.frontend.ops.recording import current as current
from mdfuse.frontend.ops.tensor_indices import index as index
from mdfuse.frontend.ops.views import stride_order as stride_order

#: The families of operations: each public function is an operation of its name.
FAMILIES = (
    views, parts, joining, moves, masks, pointwise, special, reductions, extremes, scans,
    lookups, updates, products, expert_rows, einsums, matrices, distances, neural, norms, cells,
    losses,
    convolutions, resampling, draws, creations,
)  # fmt: skip

#: other name -> operation.
ALIASES = {
    "view": "reshape", "view_as": "reshape_as", "ravel": "flatten", "broadcast_to": "expand",
    "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim", "concat": "cat",
    "concatenate": "cat", "clone": "set", "mod": "remainder",
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "negative": "neg", "absolute": "abs", "fix": "trunc", "clip": "clamp", "not_equal": "ne",
    "row_stack": "vstack", "arctan2": "atan2",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
}  # fmt: skip


def defined_in(family: ModuleType) -> dict[str, Operation]:
    """The operations that a module defines, by name."""
    functions = (
        f for name, f in vars(family).items() if not name.startswith("_") and isfunction(f)
    )
    return {f.__name__: f for f in functions if f.__module__ == family.__name__}


def _by_name() -> dict[str, Operation]:
    operations = {name: f for family in FAMILIES for name, f in defined_in(family).items()}
    checked = {name: _taking_kinds(f) for name, f in (pointwise.ROWS | operations).items()}
    return checked | {alias: checked[name] for alias, name in ALIASES.items()}


#: Every operation by name.
BY_NAME: dict[str, Operation] = _by_name()
globals().update(BY_NAME)
methods.provide(BY_NAME)
methods.OPERATIONS.update(index=index, as_dtype=_as_dtype)


#: The names for `dir` and `import *`.
__all__ = sorted(BY_NAME)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Operation:
    raise UnknownOperation(f"there is no operation {name!r}", hint=hint_for(name))
