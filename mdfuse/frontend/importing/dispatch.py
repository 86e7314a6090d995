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
from mdfuse.frontend.importing.joined import in_one
from mdfuse.frontend.ragged_operands import RaggedRefusal
from mdfuse.layouts.boxes import nth_chunk
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
) -> tuple[int, ...]:
    """Return how many rows of a batch each part has that axes split, that of the experts innermost.

    Args:
        mesh: of the module.
        inputs: the layouts of its arguments.
        experts: the axes that split matrices of experts.

    Returns:
        () where these axes do not split the batch of the arguments, or split something else.
    """
    axes = [a for a in mesh.axes if any(a in x.split_axes(0) for x in inputs.values())]
    if len(experts) != 1 or axes[-1:] != [*experts]:
        return ()
    split = {n: x for n, x in inputs.items() if x.split_axes(0)}
    extents = {n.meta["val"].shape[0] for n in split}
    is_inside = any(a in axes for x in inputs.values() for d, of in x.splits for a in of if d)
    if is_inside or any(type(n) is not int for n in extents):
        return ()
    parts = math.prod(map(mesh.axis_size, axes))
    (extent, *others) = extents
    if all(n % parts == 0 for n in extents):
        return (extent // parts,) * parts
    is_plain = all(x.split_axes(0) == (*axes,) and not x.cuts for x in split.values())
    if others or not is_plain:
        return ()
    spans = [(0, extent)]
    for n in map(mesh.axis_size, axes):
        spans = [nth_chunk(span, n, i) for span in spans for i in range(n)]
    return tuple(stop - start for start, stop in spans)


def parts_for(ids: Handle, rows: Sequence[int]) -> int | tuple[int, ...]:
    """Return the parts of tokens of which ranks have one each, as `counts` takes them; 1: none.

    Args:
        ids: the experts of each token.
        rows: how many rows of the batch each part has; see `parts_of_tokens`.
    """
    parts, tokens = len(rows), ids.shape[0]
    if len({*rows}) <= 1:
        return max(parts, 1)
    if tokens != sum(rows):
        uneven, each = " and ".join(map(str, sorted({*rows}))), tokens // sum(rows)
        _note(
            ids,
            f"rows stay, and ranks compute those of their experts among all tokens: they have "
            f"{uneven} rows of the batch, and parts of as many tokens, {each} a row, are no split "
            f"of one dim; a batch that {parts} divides goes to its experts",
        )
        return 1
    size = -(-tokens // parts)
    chunks = [max(min(size, tokens - n * size), 0) for n in range(parts)]
    return parts if chunks == [*rows] else tuple(rows)


def counted(ids: Handle, experts: int, parts: int | tuple[int, ...]) -> Handle:
    """Count the rows of each part that go to each expert."""
    note_parts(ids, parts if isinstance(parts, int) else len(parts))
    counts: Handle = ops.counts(ids, experts, parts)
    return counts


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
    line = next(iter(refusal.where), "").strip()
    _note(ids, f"{what}: {refusal.because}" + (f" ({line})" if line else ""))


def _note(ids: Handle, text: str) -> None:
    shared = ids.definition.shared
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


def grouped(x: InOrder, experts: int, parts: int | tuple[int, ...], capacity: int | None) -> Any:
    """Return rows grouped by expert; the same rows are grouped once.

    Args:
        x: the rows of the tokens.
        experts: how many there are.
        parts: of the tokens; see `parts_for`.
        capacity: the most rows of a part for an expert.
    """
    rows, order = in_one(x.base), x.order
    if x.is_sent:
        return rows
    if rows.id not in order.sent:
        counts = "counts", experts
        if counts not in order.sent:
            order.sent[counts] = counted(order.ids, experts, parts)
        order.sent[rows.id] = ops.group_rows(rows, order.ids, order.sent[counts], capacity)
    return order.sent[rows.id]
