"""Keep batch and head dims apart that a module merges to one dim for `bmm`.

With `[b*h,s,d]` heads could not stay split, so operations run on `[b,h,s,d]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mdfuse.extents.extent import are_same
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.joined import JoinedTensors
from mdfuse.frontend.importing.view_chains import Views

Dispatch = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]

#: overload -> its replacement for matrices with several batch dims.
TARGETS: Mapping[str, str] = {
    **dict.fromkeys(("aten.bmm.default", "aten.matmul.default"), "aten.matmul.default"),
    "aten.baddbmm.default": "aten.addmm.default",
    **{
        target: target
        for target in (
            "aten.softmax.int", "aten._softmax.default", "aten.mul.Tensor", "aten.mul.Scalar",
            "aten.div.Tensor", "aten.div.Scalar", "aten.add.Tensor", "aten.add.Scalar",
            "aten.sub.Tensor", "aten.to.dtype", "aten.dropout.default", "aten.masked_fill.Scalar",
        )
    },
}  # fmt: skip
_OF_ROWS = ("aten.softmax.int", "aten._softmax.default")


def on_batches(
    views: Views, target: str, args: Sequence[Any], kwargs: Mapping[str, Any], dispatch: Dispatch
) -> Handle | None:
    """Apply an operation with the first dim unmerged; None if it is one dim, or must be."""
    if target not in TARGETS or any(isinstance(x, JoinedTensors) for x in args):
        return None
    if target in _OF_ROWS and args[1] not in (1, 2, -1, -2):
        return None
    values = [x for x in args if isinstance(x, Handle)]
    front = next((extents for x in values if x.ndim == 3 and (extents := views.front(x))), None)
    if front is None or any(x.ndim > 3 for x in values):
        return None
    given: list[Any] = []
    for x in args:
        apart = _apart(views, x, front) if isinstance(x, Handle) and x.ndim == 3 else x
        if apart is None:
            return None
        given.append(apart)
    if target in _OF_ROWS:
        given[1] = args[1] % 3 - 3
    batched = dispatch(TARGETS[target], given, kwargs)
    return views.reshape(batched, (math.prod(front), *batched.shape[-2:]))


def _apart(views: Views, x: Handle, front: Sequence[int]) -> Handle | None:
    if are_same(x.shape[0], math.prod(front)):
        return views.reshape(x, (*front, *x.shape[1:]))
    return views.reshape(x, (*(1,) * len(front), *x.shape[1:])) if are_same(x.shape[0], 1) else None
