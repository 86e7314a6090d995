"""Stream all that has the dim of a batch, and add up what gives that dim up.

    %h: f32[32,64] = linear(%x, %w)                    %h: … (stream(0,8)) = linear(%x, %w)
    %dw: f32[64,64] = linear(%dh^T, %x^T)      ->      %dw: … (stream(P(sum),8)) = linear(…)
    %new: f32[64,64] = sub(%w, %dw)                    %new: … = sub(%w, %dw)

One loop over microbatches then computes outputs and gradients; what is computed of sums over the
whole batch comes after it. Which dims are the batch's, the labels of the operations say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from networkx.utils import UnionFind

from mdfuse.errors import RECOMPUTED, LoweringError
from mdfuse.extents.extent import comparable
from mdfuse.ir.dims import DimMap, always
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.layouts.stream import JOINED, Stream
from mdfuse.layouts.streamed_sets import form
from mdfuse.passes.strategy import dim_map
from mdfuse.passes.streams import chunked_label, one_dim

name = "microbatches"


def run(fusion: Fusion, batch: Mapping[str, int], count: int) -> Fusion:
    """Return the fusion with streams.

    Args:
        fusion: with layouts and sets, and without streams.
        batch: input -> its dim that is the batch's.
        count: how many microbatches.

    Raises:
        LoweringError: something needs the batch as a whole.
    """
    same: UnionFind[tuple[str, int]] = UnionFind()
    for expr in fusion.exprs:
        if fusion.values[expr.outputs[0]].is_tensor:
            for first, *others in one_dim(expr, dim_map(expr, fusion.values)):
                same.union(first, *others)
    roots = {same[name, dim] for name, dim in batch.items()}
    values = dict(fusion.values)
    for value in fusion.values.values():
        dims = [d for d in range(len(value.shape)) if same[value.name, d] in roots]
        if len(dims) > 1:
            raise _refused(fusion, value, f"its dims {dims} are the batch's at once")
        if dims and (value.name in batch or value.name in fusion.producers):
            values[value.name] = replace(value, stream=Stream(dims[0], count))
    for expr in fusion.exprs:
        for made in _streamed(fusion, expr, values, count):
            values[made.name] = made
    return _once(replace(fusion, values=values))


def _once(fusion: Fusion) -> Fusion:
    """Return the fusion without what is computed again, where it is the same for all microbatches.

    The loop would come after both: what a backward gathers again is there from the forward.
    """
    values, exprs, known = dict(fusion.values), list[Expr](), dict[object, tuple[str, ...]]()
    instead: dict[str, str] = {}
    for expr in fusion.exprs:
        inputs = (instead.get(x, x) if isinstance(x, str) else x for x in expr.inputs)
        expr = replace(expr, inputs=tuple(inputs))
        where = tuple((values[n].layout, values[n].dtype) for n in expr.outputs)
        key = comparable((expr.op, expr.inputs, expr.attrs, where))
        is_whole = all(values[name].stream is None for name in expr.outputs)
        is_again = expr.source is not None and expr.source.note == RECOMPUTED
        if is_whole and is_again and key in known:
            instead.update(zip(expr.outputs, known[key], strict=True))
            for name in expr.outputs:
                del values[name]
            continue
        if is_whole:
            known.setdefault(key, expr.outputs)
        exprs.append(expr)
    return replace(fusion, values=values, exprs=tuple(exprs))


def _streamed(
    fusion: Fusion, expr: Expr, values: Mapping[str, Value], count: int
) -> Iterator[Value]:
    """Yield the results that are computed otherwise than their dims say: added up, or whole.

    Raises:
        LoweringError: the expression needs the batch as a whole.
    """
    results = [values[name] for name in expr.outputs]
    if not results[0].is_tensor:
        return
    labels = dim_map(expr, values)
    batch = _label(expr, labels, values)
    if batch is None:
        if any(_is_read(x, values) for x in expr.inputs):
            raise _refused(fusion, results[0], f"{expr.op} needs that dim as a whole")
        return
    if not _fits(expr, labels, batch, values, count):
        shapes = " and ".join(str(list(values[x].shape)) for x in (*expr.reads, *expr.outputs))
        raise _refused(
            fusion,
            results[0],
            f"{count} microbatches do not fall together in {shapes} of {expr.op}",
            hint="choose as many as divide the rows of each rank",
        )
    for value, dims in zip(results, labels.results, strict=True):
        if batch in dims:
            if expr.op == "set" and not _is_cut(fusion, expr, value):
                yield replace(value, stream=None)
            continue
        op = labels.reduces.get(batch)
        if op not in JOINED:
            raise _refused(fusion, value, f"{expr.op} needs that dim as a whole")
        if op in ("max", "min") and any(_is_empty(values[x], count) for x in expr.reads):
            raise _refused(fusion, value, f"a microbatch is empty, and has no {op}")
        yield replace(value, stream=Stream.over(op, count))


def _label(expr: Expr, labels: DimMap, values: Mapping[str, Value]) -> int | None:
    """Return the label that the batch's dim has in an expression; None where none has it."""
    label = chunked_label(expr, values)
    for name, dims in zip(expr.outputs, labels.results, strict=True):
        stream = values[name].stream
        if label is None and stream is not None and stream.op is None:
            label = dims[stream.dim]
    return label


def _is_read(x: object, values: Mapping[str, Value]) -> bool:
    stream = values[x].stream if isinstance(x, str) else None
    return stream is not None and stream.op is None


def _fits(expr: Expr, labels: DimMap, label: int, values: Mapping[str, Value], count: int) -> bool:
    """Return whether the chunks of operands and results fall together."""
    if labels.fits is always:
        return True
    layout = values[expr.outputs[0]].layout
    assert layout is not None
    axes: Sequence[str] = ()
    for name, dims in zip(expr.outputs, labels.results, strict=True):
        if label in dims and (at := values[name].layout) is not None:
            axes = at.split_axes(dims.index(label))
    return labels.fits(label, (*map(layout.mesh.axis_size, axes), count))


def _is_cut(fusion: Fusion, expr: Expr, value: Value) -> bool:
    """Return whether a set goes chunk by chunk; else it goes whole, and what is around it."""
    assert value.layout is not None and value.stream is not None
    extent = value.shape[value.stream.dim]
    return form(fusion.layout(expr.reads[0]), value.layout, value.stream, extent) == "chunks"


def _is_empty(value: Value, count: int) -> bool:
    """Return whether some rank has no row in some microbatch."""
    stream, layout = value.stream, value.layout
    if stream is None or stream.op is not None or layout is None:
        return False
    parts = [b - a for _, (a, b) in layout.chunks_of(stream.dim, value.shape[stream.dim])]
    cut = Stream(stream.dim, count)
    return any(a >= b for n in parts for a, b in (cut.interval((0, n), i) for i in range(count)))


def _refused(
    fusion: Fusion,
    value: Value,
    because: str,
    hint: str = "compute it of sums over the batch, or compile without microbatches",
) -> LoweringError:
    return LoweringError(
        f"%{value.name} cannot be computed in microbatches",
        where=fusion.where(value.name),
        because=because,
        hint=hint,
    )
