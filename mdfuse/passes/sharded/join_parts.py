"""Compute attention where its keys are split, and join what ranks make of their parts.

    %y: f32[1,8,1,64] (cp=R) = scaled_dot_product_attention(%q, %k, %v)   # %k, %v are (cp=S2), cp=4
->
    %o: f32[4,1,8,1,64] (cp=S0), %l: f32[4,1,8,1] (cp=S0) = attention_parts(%q, %k, %v, parts=4)
    %m: f32[1,1,8,1] (cp=P(max)) = max(%l, dims=[0], keepdim=True)
    %w: f32[4,1,8,1] (cp=S0) = exp(sub(%l, %m))           # 0 where nothing is visible
    %s: f32[1,8,1,65] (cp=P(sum)) = sum(cat(mul(%o, %w), %w), dims=[0])
    %y: f32[1,8,1,64] (cp=R) = div(slice(%s), slice(%s))

So a step of decoding reads a long cache where it lies. It is done where that takes fewer bytes than
to bring keys and values together. Two parts, `%o` and `%l`, are gathered as they are, and joined
by both ranks: as many bytes in one post.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mdfuse.ir.graph import Expr, Fusion, fresh_name
from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard
from mdfuse.passes.prices import received_bytes
from mdfuse.passes.rewriting import Maker, Rule, laid_out
from mdfuse.passes.sharded.keep_splits import with_placements
from mdfuse.passes.sharded.split_attention import ATTENTIONS, ROWS
from mdfuse.passes.strategy import choose


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with such attention in parts."""
    rules: dict[str, Rule] = {}
    for expr, axes in _split(fusion):
        parts = math.prod(fusion.layout(expr.reads[0]).mesh.axis_size(a) for a in axes)
        whole = _gathered(fusion, expr, axes) if parts == 2 else None
        rules[expr.outputs[0]] = partial(_parts, parts=parts, whole=whole)
    return laid_out(fusion, rules)


# -- which -----------------------------------------------------------------------------------------


def _split(fusion: Fusion) -> Iterator[tuple[Expr, tuple[str, ...]]]:
    """Yield attention whose keys are split along axes that do not split its query."""
    for expr in fusion.exprs:
        if expr.op not in ATTENTIONS or any(fusion.values[x].stream for x in expr.reads):
            continue
        query, *others = ((fusion.layout(x), len(fusion.values[x].shape)) for x in expr.reads[:3])
        rows = {layout.split_axes(ndim + ROWS) for layout, ndim in others}
        (axes, *apart) = rows
        axes = tuple(a for a in axes if query[0].mesh.axis_size(a) > 1)
        is_free = all(isinstance(query[0].placement(a), Replicate) for a in axes)
        is_plain = all(ndim + ROWS not in layout.blocked for layout, ndim in others)
        is_here = all(layout.mesh == query[0].mesh for layout, _ in others)
        if axes and is_here and not apart and is_free and is_plain and _is_less(fusion, expr, axes):
            yield expr, axes


def _is_less(fusion: Fusion, expr: Expr, axes: tuple[str, ...]) -> bool:
    """Return whether results in f32 are fewer bytes to reduce than to move operands and results."""
    values = fusion.values
    outs = [values[x] for x in expr.outputs]
    laws = [v.layout if v.is_law else None for v in outs]
    strategy = choose(expr, values, *laws)
    if strategy is None:
        return False
    moved = sum(
        received_bytes(values[x], fusion.layout(x), to) for x, to in strategy.wanted.items()
    )
    ends = zip(outs, strategy.results, laws, strict=True)
    moved += sum(received_bytes(v, before, law) for v, before, law in ends if law is not None)
    terms = with_placements(fusion.layout(expr.reads[0]), axes, Partial())
    whole = laws[0] or with_placements(terms, axes, Replicate())
    if whole.mesh != terms.mesh or whole.partial_axes:
        return False
    size = max(1, 4 / outs[0].dtype.itemsize)
    return received_bytes(outs[0], terms, whole) * size * _MORE < moved


def _gathered(fusion: Fusion, expr: Expr, axes: tuple[str, ...]) -> Layout | None:
    """Return the layout of all parts behind a gather; None where results are split by it, or heads
    of the query are whole while those of keys are split.
    """
    query, keys = (fusion.layout(x) for x in expr.reads[:2])
    if any(not _is_whole(x, query, axes) for x in _laws(fusion, expr.outputs[0])):
        return None
    whole = Layout(query.mesh, {})
    for axis in query.mesh.axes:
        placement = query.placement(axis)
        if axis in axes or query.mesh.axis_size(axis) == 1:
            continue
        if placement != keys.placement(axis) or isinstance(placement, Partial):
            return None
        if isinstance(placement, Shard):
            whole = whole.with_placement(axis, replace(placement, dim=placement.dim + 1))
    return whole


def _laws(fusion: Fusion, name: str) -> Iterator[Layout]:
    """Yield the layouts that are asked for a value, and for copies of it."""
    copies = (e.outputs[0] for e in fusion.exprs if e.op == "set" and name in e.inputs)
    for x in (name, *copies):
        value = fusion.values[x]
        if value.is_law and value.layout is not None:
            yield value.layout


def _is_whole(law: Layout, query: Layout, axes: tuple[str, ...]) -> bool:
    """Tell whether ranks that have parts of the keys all have a value whole."""
    return law.mesh == query.mesh and all(isinstance(law.placement(a), Replicate) for a in axes)


#: The sums and maxima, beside the results: one number for each row, which has many features.
_MORE = 1.25


# -- by what ---------------------------------------------------------------------------------------


def _parts(maker: Maker, by: Expr, parts: int, whole: Layout | None) -> None:
    """Append attention to each part of the keys, and the join of its results.

    Args:
        maker: of the fusion.
        by: the attention.
        parts: how many there are.
        whole: the layout in which they are gathered; None: they stay where they are.
    """
    out = fresh_name(maker.values, f"{by.outputs[0]}.parts")
    how = {**by.kwargs, "parts": parts}
    sums = maker.several(by, "attention_parts", *by.inputs, first=out, **how)
    last, n = len(maker.values[out].shape) - 1, maker.values[out].shape[-1]
    terms, logs = maker.wide(by, out), maker.op(by, "unsqueeze", sums, dims=(last,))
    if whole is not None:
        both = maker.op(by, "set", maker.op(by, "cat", terms, logs, dim=last))
        maker.values[both] = replace(maker.values[both], layout=whole, is_law=True)
        terms, logs = maker.columns(by, both, 0, n), maker.columns(by, both, n, n + 1)
    top = maker.op(by, "max", logs, dims=(0,), keepdim=True)
    shift = maker.op(by, "where", maker.op(by, "eq", top, -math.inf), 0.0, top)
    weights = maker.op(by, "exp", maker.op(by, "sub", logs, shift))
    weighed = maker.op(by, "mul", terms, weights)
    total = maker.op(by, "sum", maker.op(by, "cat", weighed, weights, dim=last), dims=(0,))
    over, under = maker.columns(by, total, 0, n), maker.columns(by, total, n, n + 1)
    safe = maker.op(by, "where", maker.op(by, "eq", under, 0.0), 1.0, under)
    joined = maker.op(by, "div", over, safe)
    maker.cast_as(by, joined)
    if len(by.outputs) == 2:
        rows = maker.op(by, "squeeze", maker.op(by, "log", under), dims=(last - 1,))
        maker.op(by, "add", rows, maker.op(by, "squeeze", shift, dims=(0, last)), last=True)
