"""Send rows to the ranks of their experts, and back, where the same ranks split tokens and experts.

A deferred sort is then a grouping: rows of the tokens become a ragged value, which products with
matrices of experts take to where these are. Rows come back where the module puts them back, or
combines them with rows of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.fx import Node

from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.deferred import GraphCall, InOrder, bases, mapped_leaves
from mdfuse.frontend.importing.joined import JoinedTensors
from mdfuse.frontend.ragged_operands import RaggedRefusal
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh

ops: Any = operations

#: Those of rows that are where their experts are, besides pointwise ones; and those of columns.
_ON_SENT = (
    "aten.to.dtype", "aten._to_copy.default", "aten.to.dtype_layout", "aten.alias.default",
    "aten.contiguous.default", "aten.clone.default", "aten.detach.default",
)  # fmt: skip
COLUMNS = (
    "aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default",
    "aten.split.sizes", "aten.slice.Tensor",
)  # fmt: skip


def parts_of_tokens(
    mesh: DeviceMesh, inputs: Mapping[Node, Layout], experts: Collection[str]
) -> int:
    """Return in how many equal parts axes split the tokens, the one of the experts innermost.

    Args:
        mesh: of the module.
        inputs: the layouts of its arguments.
        experts: the axes that split matrices of experts.

    Returns:
        1 where these axes do not split the batch of the arguments, or split something else.
    """
    axes = [a for a in mesh.axes if any(a in x.split_axes(0) for x in inputs.values())]
    parts = math.prod(map(mesh.axis_size, axes))
    if len(experts) != 1 or axes[-1:] != [*experts]:
        return 1
    for node, layout in inputs.items():
        is_inside = any(a in axes for d, of in layout.splits for a in of if d)
        extent = node.meta["val"].shape[0] if layout.split_axes(0) else 0
        if is_inside or type(extent) is not int or extent % parts:
            return 1
    return parts


def applied(
    call: GraphCall, args: Any, kwargs: Mapping[str, Any], ordered: Sequence[InOrder]
) -> Any:
    """Apply a call to rows where their experts are.

    Where it is none on such rows, or has rows of tokens beside them, rows come back before.
    """
    order = ordered[0].order
    are_there = all(x.is_sent or x.table is not None for x in ordered)
    if are_there and (call.is_pointwise or call.target in _ON_SENT):
        moved = mapped_leaves((args, dict(kwargs)), _spread_table)
        try:
            return InOrder(order, call.apply(call.target, *bases(moved, InOrder)), is_sent=True)
        except RaggedRefusal as refusal:  # the tokens' ranks compute it
            note(order.ids, f"rows come back from their experts for {call.target}", refusal)
    moved = mapped_leaves((args, dict(kwargs)), come_back)
    return InOrder(order, call.apply(call.target, *bases(moved, InOrder)))


def note(ids: Handle, what: str, refusal: RaggedRefusal) -> None:
    """Note for `report()` and `explain()` what rows of experts do not take, and why."""
    shared = ids.definition.shared
    line = next(iter(refusal.where), "").strip()
    text = f"{what}: {refusal.because}" + (f" ({line})" if line else "")
    shared["notes"] = tuple(dict.fromkeys((*shared.get("notes", ()), text)))


def note_parts(ids: Handle, parts: int) -> None:
    """Note that a definition depends on how many ranks split tokens or experts."""
    if parts > 1:
        what = f"experts of tokens in {parts} parts, as ranks have them"
        ids.definition.shared["by_ranks"] = (what,)


def come_back(x: Any) -> Any:
    """Return rows where their tokens are."""
    return InOrder(x.order, x.together()) if isinstance(x, InOrder) and x.is_sent else x


def _spread_table(x: Any) -> Any:
    """Return a row per expert in the place of rows looked up by expert."""
    is_table = isinstance(x, InOrder) and x.table is not None
    return ops.unsqueeze(x.table, 1) if is_table else x


def grouped(x: InOrder, experts: int, parts: int, capacity: int | None) -> Any:
    """Return rows grouped by expert; the same rows are grouped once."""
    if x.is_sent:
        return x.base.whole() if isinstance(x.base, JoinedTensors) else x.base
    rows, order = x.base.whole() if isinstance(x.base, JoinedTensors) else x.base, x.order
    if rows.id not in order.sent:
        note_parts(order.ids, parts)
        counts = "counts", experts
        if counts not in order.sent:
            order.sent[counts] = ops.counts(order.ids, experts, parts)
        order.sent[rows.id] = ops.group_rows(rows, order.ids, order.sent[counts], capacity)
    return order.sent[rows.id]
