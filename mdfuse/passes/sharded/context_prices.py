"""The prices of the forms in `mdfuse.passes.sharded.context_parallel`.

A price is in bytes: those that arrive at a rank where layouts change, and for the rank with most
pairs of a row and a key the bytes that could arrive while it computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import add
from typing import NamedTuple

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.visible import Run, tiles
from mdfuse.layouts.layout import Layout, Shard
from mdfuse.passes.prices import received_bytes
from mdfuse.passes.sharded import attention_masks
from mdfuse.passes.sharded.split_attention import HEADS, ROWS, SplitAttention

#: The floating-point operations of an attention that a GPU computes while a byte arrives over fast
#: links: some 500 TFLOP/s beside 350 GB/s.
PER_BYTE = 1500


#: What a report says of a mask.
_HIDDEN = "; what its mask hides is computed, too: up to"


#: A number that is joined is read twice and written twice, in 4 bytes each, by a memory that is
#: some ten times as fast as links.
_JOINED = 1.6

#: A byte of a mask is made, added to scores in their dtype, and read, likewise.
_MADE = 0.5

#: The bytes that could arrive while the posts and kernels of one step of a ring are started.
_POSTED = 4 << 20

#: How much more a ring may bring than the form that brings least.
_MORE = 1.05


class Price(NamedTuple):
    """The price of a form.

    Attributes:
        form: "gather", "heads" or "ring".
        received: bytes that arrive at a rank, forward and backward.
        share: the pairs of the rank with most of them, of a fair share.
        total: bytes, those that could arrive during the work, and while masks are made, included.
    """

    form: str
    received: float
    share: float
    total: float


def prices(split: SplitAttention, has_ring: bool) -> list[Price]:
    """Return the price of each form that there is; none where a run chooses the extents."""
    values = split.fusion.values
    if any(is_symbolic(values[x].shape) for x in split.operands):
        return []
    _, k, v = split.operands
    _, of_keys, of_values = split.wanted
    back = (*[k] * of_keys, *[v] * of_values)  # gradients travel as keys and values do
    of_mask = _bytes_of_mask(split, split.rows)
    forms = {"gather": (_moved(split, (k, v, *back), split.read) + of_mask, _share_of_rows(split))}
    if not split.because:
        forms["heads"] = _moved_by_heads(split), _share_of_heads(split)
    if has_ring:  # a gradient brings keys and values again
        around = (*(k, v) * (1 + len(split.gradients)), *back)
        forms["ring"] = _moved(split, around, split.whole) + of_mask, _share_of_rows(split)
    ranks = math.prod(split.rows.mesh.axis_size(a) for a in split.axes)
    work = _operations(split) / ranks * (3.5 if split.is_trained else 1) / PER_BYTE
    mask = _MADE * values[split.mask].bytes if split.mask is not None else 0
    hidden, each = partial(_around, split, ranks), list[Price]()
    for form, (moved, share) in forms.items():
        busy = work * share + mask / (1 if form == "heads" else ranks)
        total = (hidden if form == "ring" else add)(moved, busy)
        each.append(Price(form, moved, share, total))
    return each


def best(known: Sequence[Price]) -> str:
    """Return the form that takes the least; a ring, only where it brings no more than others."""
    least = min(p.received for p in known)
    allowed = [p for p in known if p.form != "ring" or p.received <= _MORE * least]
    return min(allowed, key=lambda p: p.total).form


def _around(split: SplitAttention, ranks: int, moved: float, work: float) -> float:
    """Return the price of a ring, in which keys arrive while a rank computes with others.

    Bare are one of its steps, what is joined behind each, and the posts.
    """
    q, _, v = (split.shape(x) for x in split.operands)
    rows = split.rows.local_shape(q)
    joined = math.prod(rows[:-1]) * (v[-1] + 1) * _JOINED
    steps = ranks * (2 if split.is_trained else 1)
    return max(moved, work) + min(moved, work) / ranks + steps * (joined + _POSTED)


def line(split: SplitAttention, form: str, known: Sequence[Price], is_asked: bool) -> str:
    """Return the line of a report about the form of an attention."""
    source = split.expr.source
    where = f" ({source})" if source else ""
    axes = " and ".join(split.axes)
    text = f"attention %{split.expr.outputs[0]}{where}, positions split along {axes}: {form}"
    text += ", as context= asks" if is_asked else ""
    if split.hides and known:
        seen = f"{max(_pairs(split)):,} pairs of a head on a rank"
        text += "; of its documents are at most" if split.mask is None else _HIDDEN
        text += f" {seen}"
    rows = split.over_heads(split.operands[0]) if form == "heads" else split.rows
    moved = [x for x, at in attention_masks.received(split, rows) if _is_moved(split, x, at)]
    if moved:
        text += f"; resharded to the rows of its query: {', '.join(f'%{x}' for x in moved)}"
    each = (f"{p.form} {p.received:,.0f} bytes and {p.share:.2f} of a fair share" for p in known)
    return text + (f"; to the busiest rank: {', '.join(each)}" if known else "")


def _is_moved(split: SplitAttention, x: str, to: Layout) -> bool:
    """Return whether one of the axes splits a value, and in another way than a layout does."""
    pairs = [(split.fusion.layout(x).placement(a), to.placement(a)) for a in split.axes]
    return any(
        isinstance(old, Shard) and isinstance(new, Shard) and old != new for old, new in pairs
    )


def _moved_by_heads(split: SplitAttention) -> float:
    """Return the bytes that arrive where positions are exchanged for heads, and back.

    Heads of keys that ranks share are repeated before, and their gradients are added up behind.
    """
    q, k, v = split.operands
    (of_query, *of_keys), y = split.wanted, split.expr.outputs[0]
    rows = (*[q] * (1 + of_query), *[y] * (1 + len(split.gradients)))
    moved, dim = _moved(split, rows, split.over_heads), split.dim(HEADS)
    for x, gradients in zip((k, v), of_keys, strict=True):
        value, layouts = split.fusion.values[x], (split.fusion.layout(x), split.over_heads(x))
        shape, expanded = [*value.shape], value.expanded
        if split.is_shared:
            expanded |= {dim} if shape[dim] == 1 else set()
            shape[dim] = split.shape(q)[dim]
        many = replace(value, shape=(*shape,))
        moved += received_bytes(replace(many, expanded=expanded), *layouts)
        moved += gradients * received_bytes(many, *layouts)
    return moved + _bytes_of_mask(split, split.over_heads(q))


def _bytes_of_mask(split: SplitAttention, to: Layout) -> float:
    """Return the bytes that arrive of what the mask is made of, for a query in a layout."""
    at = dict(attention_masks.received(split, to))
    return _moved(split, [*at], at.__getitem__)


def _moved(split: SplitAttention, names: Sequence[str], to: Callable[[str], Layout]) -> float:
    """Return the bytes that arrive where values get other layouts."""
    values, layout = split.fusion.values, split.fusion.layout
    return sum((received_bytes(values[x], layout(x), to(x)) for x in names), start=0.0)


def _operations(split: SplitAttention) -> float:
    """Return the floating-point operations of all ranks of the axes together."""
    q, _, v = (split.shape(x) for x in split.operands)
    rows = split.rows
    others = math.prod(
        rows.mesh.axis_size(a)
        for d in range(len(q) - 2)
        for a in rows.split_axes(d)
        if a not in split.axes
    )
    return 2 * (q[-1] + v[-1]) * math.prod(q[:-2]) / others * max(1, sum(_pairs(split)))


def _share_of_rows(split: SplitAttention) -> float:
    pairs = _pairs(split)
    return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0


def _share_of_heads(split: SplitAttention) -> float:
    """Return how much more than a fair share the rank with most heads has."""
    n = split.parts
    heads = split.shape(split.operands[0])[HEADS]
    return -(-heads // n) * n / heads if heads else 1.0


def _pairs(split: SplitAttention) -> tuple[int, ...]:
    """Return the pairs of rows and keys that each rank along the axes computes, for one head."""
    q, k, _ = (split.shape(x) for x in split.operands)
    attrs = split.expr.kwargs
    runs = tuple(split.rows.rows_at(q, c)[ROWS] for c in _coordinates(split))
    shift = attrs.get("q_offset", 0) - attrs.get("k_offset", 0)
    shift = shift if isinstance(shift, int) else 0
    shifted = tuple(tuple((a + shift, b + shift) for a, b in each) for each in runs)
    return _counted(shifted, k[-2], bool(attrs.get("is_causal")), attrs.get("window"))


def _coordinates(split: SplitAttention) -> list[tuple[int, ...]]:
    """Return the coordinates of ranks that differ along the axes alone."""
    mesh, every = split.rows.mesh, list[tuple[int, ...]]([()])
    for axis in mesh.axes:
        places = range(mesh.axis_size(axis)) if axis in split.axes else range(1)
        every = [(*c, i) for c in every for i in places]
    return every


@lru_cache(maxsize=256)
def _counted(
    runs: tuple[tuple[Run, ...], ...], keys: int, is_causal: bool, window: int | None
) -> tuple[int, ...]:
    each = (tiles(rows, ((0, keys),), is_causal, window) for rows in runs)
    return tuple(sum(t.pairs for t in seen) for seen in each)
