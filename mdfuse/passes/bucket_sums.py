"""Reduce small values together (`Options.bucket_bytes`).

    %g: f32[6] (dp=R) = set(%g.partial)                 # %g.partial is (dp=P(sum))
    %b: f32[4,2] (dp=R) = set(%b.partial)               # %b.partial is, too
->
    %g.rows: f32[1,6] (dp=P(sum)) = reshape(%g.partial, shape=[1,6])
    %b.rows: f32[1,8] (dp=P(sum)) = reshape(%b.partial, shape=[1,8])
    %bucket.partial: f32[1,14] (dp=P(sum)) = cat(%g.rows, %b.rows, dim=1)
    %bucket: f32[1,14] (dp=R) = set(%bucket.partial)
    %g: f32[6] (dp=R) = reshape(slice of %bucket)
    %b: f32[4,2] (dp=R) = reshape(slice of %bucket)

A bucket is reduced where the last of its values is there, so nothing may read one of them before;
what ends a sum goes with it: a cast, as `Options.reduce_dtype` puts around each set, or a count. So
a bucket is in the wide dtype, and what microbatches added up in that is not rounded on the way into
it.

Split values are split evenly along their first dim. The bucket's first dim has one row per part, so
that a rank's rows of the bucket are its rows of each value.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from mdfuse.errors import BACKWARD
from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name, leading_to
from mdfuse.layouts.layout import Layout, Shard
from mdfuse.passes import microbatches

name = "bucket_sums"


class _Kind(NamedTuple):
    """The properties that all values of a bucket share."""

    before: Layout
    after: Layout
    dtype: object


class _Bucket(NamedTuple):
    """Sets that become one, by their places among the expressions, and their bytes on a rank.

    Attributes:
        sets: the sets, in order.
        before, after: casts of their operands, and of their results.
        bytes: on a rank.
    """

    sets: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    bytes: int = 0


def run(fusion: Fusion, most: int, batch: Mapping[str, int] | None = None) -> Fusion:
    """Return the fusion in which reductions share buckets of up to `most` bytes on each rank.

    Args:
        fusion: with all sets.
        most: the option.
        batch: input -> its dim that is the batch's, where that is taken in microbatches. Then
            what has that dim goes alone, since a bucket has no rows of it; and so does a sum that
            the backward waits for, as for a count: it would wait for all in its bucket.
    """
    alone = _waited_for(fusion) | microbatches.cut(fusion, batch) if batch is not None else set()
    buckets = [b for b in _buckets(fusion, most, alone) if len(b.sets) > 1]
    if not buckets:
        return fusion
    values = dict(fusion.values)
    moved = {at for b in buckets for at in (*b.sets, *b.before, *b.after)}
    together = {b.sets[-1]: b for b in buckets}
    exprs: list[Expr] = []
    for at, expr in enumerate(fusion.exprs):
        if at in together:
            bucket = together[at]
            exprs.extend(fusion.exprs[n] for n in bucket.before)
            exprs.extend(_merged([fusion.exprs[n] for n in bucket.sets], values))
            exprs.extend(fusion.exprs[n] for n in bucket.after)
        elif at not in moved:
            exprs.append(expr)
    return replace(fusion, values=values, exprs=tuple(exprs))


def _buckets(fusion: Fusion, most: int, alone: Container[str]) -> Iterator[_Bucket]:
    """Yield the buckets: each is filled in order, until one of its values is read."""
    filling: dict[_Kind, _Bucket] = {}
    #: value -> what is in a bucket that is being filled
    waiting: dict[str, _Kind] = {}
    #: a sum that is widened for one set -> the place of that
    widened: dict[str, int] = {}
    for at, expr in enumerate(fusion.exprs):
        if expr.op == "widen" and len(fusion.consumers[expr.output]) == 1:
            widened[expr.output] = at
        if _ends_sum(expr, fusion) and (kind := waiting.get(expr.reads[0])) is not None:
            filling[kind] = filling[kind]._replace(after=(*filling[kind].after, at))
            waiting[expr.output] = kind
            continue
        for read in {waiting[x] for x in expr.reads if x in waiting}:
            yield filling.pop(read)
            waiting = {x: k for x, k in waiting.items() if k != read}
        kind = _kind(expr, fusion)
        if kind is None or expr.output in alone:
            continue
        size = _bytes(fusion.values[expr.reads[0]])
        if size > most:
            continue
        bucket = filling.get(kind, _Bucket())
        if bucket.bytes + size > most:
            yield bucket
            waiting = {x: k for x, k in waiting.items() if k != kind}
            bucket = _Bucket()
        before = (widened[x] for x in expr.reads if x in widened)
        filling[kind] = bucket._replace(
            sets=(*bucket.sets, at),
            before=(*bucket.before, *before),
            bytes=bucket.bytes + size,
        )
        waiting[expr.output] = kind
    yield from filling.values()


def _ends_sum(expr: Expr, fusion: Fusion) -> bool:
    """Return whether an expression rounds a value, takes it times or by a number, or copies it.

    It may come later then, with the value.
    """
    if expr.op == "set":
        return fusion.layout(expr.reads[0]) == fusion.layout(expr.output)
    return expr.op in ("cast", "mul", "div") and len(expr.reads) == 1


def _waited_for(fusion: Fusion) -> set[str]:
    """Return the values of the forward on which the backward depends."""
    leading = leading_to(fusion.exprs, (), lambda e: e.note == BACKWARD)
    back = (x for e in fusion.exprs if e.note == BACKWARD for x in e.outputs)
    return {x for e in leading for x in e.reads}.difference(back)


def _kind(expr: Expr, fusion: Fusion) -> _Kind | None:
    """Return the kind of bucket for a set; None if it does not reduce, or stays alone."""
    if expr.op != "set" or not (fusion.consumers[expr.output] or expr.output in fusion.returned):
        return None
    x, y = fusion.values[expr.reads[0]], fusion.values[expr.output]
    before, after = x.layout, y.layout
    assert before is not None and after is not None
    reduces = before.mesh == after.mesh and {*before.partial_axes} > {*after.partial_axes}
    if not reduces or after.partial_axes or not x.size or not x.is_tensor:
        return None
    is_plain = all(
        v.stream is None and not v.expanded and v.order == tuple(range(len(v.shape)))
        for v in (x, y)
    )
    if not is_plain or y.is_order_required or not _is_even(x.shape, before, after):
        return None
    return _Kind(before, after, x.dtype)


def _is_even(shape: tuple[int, ...], *layouts: Layout) -> bool:
    """Return whether only the first dim is split, into equal parts."""
    parts = _rows(*layouts)
    dims = {p.dim for layout in layouts for p in layout.placements if isinstance(p, Shard)}
    return dims <= {0} and (not dims or shape[0] % parts == 0)


def _rows(*layouts: Layout) -> int:
    """Return the number of parts of the finest split."""
    axes = {
        axis for layout in layouts for axis, p in layout.by_axis().items() if isinstance(p, Shard)
    }
    rows = 1
    for axis in axes:
        rows *= layouts[0].mesh.axis_size(axis)
    return rows


def _bytes(value: Value) -> int:
    """Return the bytes of a rank's part of a value that is split evenly."""
    return value.bytes // _rows(value.placed)


def _merged(sets: list[Expr], values: dict[str, Value]) -> Iterator[Expr]:
    """Yield the expressions that reduce several values as one."""
    first = values[sets[0].reads[0]], values[sets[0].output]
    rows = _rows(first[0].placed, first[1].placed)
    widths = [values[e.output].size // rows for e in sets]
    parts = []
    for expr, width in zip(sets, widths, strict=True):
        x = expr.reads[0]
        part = _added(values, values[x], f"{x}.rows", (rows, width))
        parts.append(part)
        yield _view(expr, "reshape", x, part, shape=(rows, width))
    last, shape = sets[-1], (rows, sum(widths))
    packed = _added(values, first[0], "bucket.partial", shape)
    whole = _added(values, first[1], "bucket", shape)
    yield replace(last, op="cat", inputs=tuple(parts), outputs=(packed,), attrs=(("dim", 1),))
    yield replace(last, inputs=(packed,), outputs=(whole,))
    start = 0
    for expr, width in zip(sets, widths, strict=True):
        piece = _added(values, first[1], f"{expr.output}.rows", (rows, width))
        bounds = {"starts": (0, start), "ends": (rows, start + width), "steps": (1, 1)}
        yield _view(expr, "slice", whole, piece, **bounds)
        yield _view(expr, "reshape", piece, expr.output, shape=values[expr.output].shape)
        start += width


def _view(by: Expr, op: str, x: str, y: str, **attrs: tuple[int, ...]) -> Expr:
    return replace(by, op=op, inputs=(x,), outputs=(y,), attrs=tuple(attrs.items()))


def _added(values: dict[str, Value], like: Value, name: str, shape: tuple[int, ...]) -> str:
    added = fresh_name(values, name)
    values[added] = replace(
        like, name=added, shape=shape, order=(0, 1), order_from="op", is_law=False, like=None
    )
    return added
