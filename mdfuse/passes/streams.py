"""Take streams out of layouts: a layout then says where data is, a stream when it is computed.

    %y: f32[8,4] (tp=S1, stream(0,4))! = add(%x, %b)    # layout (tp=S1), stream (0,4)

Every pass after this one compares layouts without streams. What a stream means for the operands of
an expression is `operand_streams`: the dims with the label of the streamed dim are streamed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from networkx.utils import UnionFind

from mdfuse.errors import LoweringError
from mdfuse.ir.dims import DimMap, always, reshape_groups, unit_rows
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.layouts.stream import Stream
from mdfuse.layouts.streamed_sets import form
from mdfuse.passes.strategy import dim_map
from mdfuse.reshard.block_steps import moved

name = "split_streams"

_RESHAPED = (
    "the reshape splits or merges that dim: a chunk of the result is none of its operand",
    "chunks of whole rows before and after it, or stream a dim that the reshape keeps",
)


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with streams apart from layouts.

    Raises:
        LoweringError: an op cannot compute the result chunk by chunk along that dim; the lengths
            of chunks do not fit; a value is said to be added up.
    """
    values = dict(fusion.values)
    for value in fusion.values.values():
        if value.layout is not None and value.layout.stream is not None:
            if value.layout.stream.op is not None:
                raise LoweringError(
                    f"%{value.name} is {value.layout.stream}",
                    where=fusion.where(value.name),
                    because="what is added up of a batch follows from where the batch is streamed",
                    hint="mf.pipeline(definition, microbatches=…, batch={input: dim})",
                )
            layout = value.layout.with_stream(None)
            values[value.name] = replace(value, layout=layout, stream=value.layout.stream)
    fusion = check_lengths(replace(fusion, values=values), has_sets=False)
    for expr in fusion.exprs:
        if expr.op == "reshape" and (value := values[expr.output]).stream is not None:
            values[value.name] = _in_lengths(expr, value, values)
    fusion = replace(fusion, values=values)
    for expr in fusion.exprs:
        for name in expr.outputs:
            if values[name].stream is not None:
                _check(fusion, expr, name)
    return fusion


def _in_lengths(expr: Expr, value: Value, values: Mapping[str, Value]) -> Value:
    """Return a result of a reshape in chunks of given lengths, where counted ones do not do.

    Five rows in two chunks are 3 and 2, but the 20 rows that they are made of are 10 and 10.
    """
    stream, layout = value.stream, value.layout
    assert stream is not None
    extent = value.shape[stream.dim]
    is_counted = isinstance(stream.chunks, int) and isinstance(extent, int) and layout is not None
    if not is_counted or layout is None or falls_together(expr, values):
        return value
    parts = {b - a for _, (a, b) in layout.chunks_of(stream.dim, extent)}
    if len(parts) > 1:
        return value
    cuts = (stream.interval((0, max(parts)), i) for i in range(stream.count))
    return replace(value, stream=replace(stream, chunks=tuple(b - a for a, b in cuts)))


def operand_streams(expr: Expr, values: Mapping[str, Value]) -> tuple[Stream | None, ...]:
    """Return how each operand of a streamed result is read: in chunks, or whole (None)."""
    stream = values[expr.outputs[0]].stream
    assert stream is not None
    if (units := unit_stream(expr, values)) is not None:
        return (units,)
    labels, given = chunk_map(expr, values), chunked_label(expr, values)
    if expr.op == "reshape" and given is None:
        dim = _kept_dim(expr, values, stream.dim)
        if dim is not None:
            return (replace(stream, dim=dim),)
    label = given if stream.op is not None else labels.results[0][stream.dim]
    chunk = replace(stream, op=None)
    if expr.op == "reshape" and label is not None:
        (dims,) = labels.operands
        before, after = values[expr.reads[0]].shape, values[expr.output].shape
        scaled = chunk.scaled(before[dims.index(label)], after[chunk.dim])
        return (replace(scaled, dim=dims.index(label)) if scaled is not None else None,)
    return tuple(
        _term(x, values)
        if at in labels.terms
        else replace(chunk, dim=dims.index(label))
        if label is not None and label in dims
        else None
        for at, (x, dims) in enumerate(zip(expr.inputs, labels.operands, strict=True))
    )


def chunk_map(expr: Expr, values: Mapping[str, Value]) -> DimMap:
    """Return the labels of dims that a loop takes in chunks."""
    return dim_map(expr, values).of_chunks


def _term(x: object, values: Mapping[str, Value]) -> Stream | None:
    """Return the stream of a sum, of which a chunk reads what the same chunk adds; else None."""
    stream = values[x].stream if isinstance(x, str) else None
    return stream if stream is not None and stream.op is not None else None


def unit_stream(expr: Expr, values: Mapping[str, Value]) -> Stream | None:
    """Return the stream of a reshape's operand for a result streamed along an unlabelled dim.

    One row of the one is all rows of the other; None where there is no such stream.
    """
    if expr.op != "reshape":
        return None
    (x,), y = expr.reads, values[expr.output]
    stream, result = values[x].stream, y.stream
    if stream is None or result is None or stream.op is not None or result.op is not None:
        return None
    is_one = unit_rows(values[x].shape, y.shape).get(stream.dim) == result.dim
    return stream if is_one else None


def chunked_label(expr: Expr, values: Mapping[str, Value]) -> int | None:
    """Return the label of the dim of operands that are streamed; None where none is."""
    for x, dims in zip(expr.inputs, chunk_map(expr, values).operands, strict=True):
        stream = values[x].stream if isinstance(x, str) else None
        if stream is not None and stream.op is None:
            return dims[stream.dim]
    return None


def streamed_label(expr: Expr, labels: DimMap, values: Mapping[str, Value]) -> int | None:
    """Return the label of the streamed dim of operands, or of results; None where none has it."""
    label = chunked_label(expr, values)
    for name, dims in zip(expr.outputs, labels.results, strict=True):
        stream = values[name].stream
        if label is None and stream is not None and stream.op is None:
            label = dims[stream.dim]
    return label


def falls_together(expr: Expr, values: Mapping[str, Value]) -> bool:
    """Return whether the chunks of an expression's operands and results have the same borders.

    Those of windows that reach over rows have none. Values without a layout count as whole.
    """
    if not values[expr.outputs[0]].is_tensor:
        return True
    if (stream := unit_stream(expr, values)) is not None:
        x, y = (values[name] for name in (*expr.reads, *expr.outputs))
        assert y.stream is not None
        return stream.count == 1 or x.shape[stream.dim] == y.shape[y.stream.dim]
    labels = chunk_map(expr, values)
    if labels.fits is always and not labels.reaches:
        return True
    label = streamed_label(expr, labels, values)
    if label is None or label in labels.reaching:
        return label is None
    streams = [s for x in (*expr.reads, *expr.outputs) if (s := values[x].stream) is not None]
    counts = {s.count for s in streams if isinstance(s.chunks, int)}  # given lengths are scaled
    axes: Sequence[int] = ()
    names, dims_of = (*expr.inputs, *expr.outputs), (*labels.operands, *labels.results)
    for name, dims in zip(names, dims_of, strict=True):
        if label in dims and (at := values[str(name)].layout) is not None:
            split = [at.mesh.axis_size(a) for a in at.split_axes(dims.index(label))]
            axes = split or axes
    if not counts and dim_map(expr, values).in_chunks is not None:
        return False  # chunks of given lengths
    return labels.fits(label, (*axes, *counts))


def _kept_dim(expr: Expr, values: Mapping[str, Value], dim: int) -> int | None:
    """Return the operand's dim that a reshape keeps as a dim of its result; None where none is."""
    before, after = values[expr.reads[0]].shape, values[expr.output].shape
    for old, new in reshape_groups(before, after):
        if dim not in new:
            continue
        if after[dim] != 1:  # dims of one element come and go
            old = [d for d in old if before[d] != 1]
            new = [d for d in new if after[d] != 1]
        return old[0] if len(old) == len(new) == 1 else None
    return None


def streamed_alike(fusion: Fusion) -> Callable[[str], object]:
    """Return a function: streamed value -> a key, equal where streamed dims correspond."""
    if all(value.stream is None for value in fusion.values.values()):
        return lambda value: None
    same: UnionFind[tuple[str, int]] = UnionFind()
    for expr in fusion.exprs:
        for first, *others in _corresponding(expr, fusion.values):
            same.union(first, *others)

    def key(value: str) -> object:
        stream = fusion.values[value].stream
        return same[value, stream.dim] if stream is not None else None

    return key


def _corresponding(expr: Expr, values: Mapping[str, Value]) -> Iterable[list[tuple[str, int]]]:
    """Yield the dims of operands and result that are streamed together, as (value, dim)."""
    out = values[expr.outputs[0]]
    if not out.is_tensor:
        return
    if out.stream is not None:
        pairs = zip(expr.inputs, operand_streams(expr, values), strict=True)
        read = [(x, s.dim) for x, s in pairs if isinstance(x, str) and s is not None]
        yield [(out.name, out.stream.dim), *read]
    yield from one_dim(expr, chunk_map(expr, values))


def one_dim(expr: Expr, labels: DimMap) -> Iterable[list[tuple[str, int]]]:
    """Return the dims of operands and results, as (value, dim), that are one dim of the op."""
    dims_of_label: dict[int, list[tuple[str, int]]] = {}
    names, dims_of = (*expr.inputs, *expr.outputs), (*labels.operands, *labels.results)
    for name, dims in zip(names, dims_of, strict=True):
        for dim, label in enumerate(dims):
            if isinstance(name, str) and label is not None:
                dims_of_label.setdefault(label, []).append((name, dim))
    return dims_of_label.values()


def check_lengths(fusion: Fusion, has_sets: bool = True) -> Fusion:
    """Check that lengths of chunks fit each rank's part where it is known; return the fusion.

    Those of what a ring scatters fit all its parts together.

    Args:
        fusion: without streams in layouts.
        has_sets: whether it is known which values a ring scatters.

    Raises:
        LoweringError: they do not, or a loop whose chunks turn would exchange rows in blocks.
    """
    for expr in fusion.exprs if has_sets else ():
        if expr.op == "set":
            _check_turning(fusion, expr)
    for value in fusion.values.values():
        stream, layout = value.stream, value.layout
        if stream is None or layout is None or not isinstance(stream.chunks, tuple):
            continue
        parts = [b - a for _, (a, b) in layout.chunks_of(stream.dim, value.shape[stream.dim])]
        if any(n != sum(stream.chunks) for n in parts):
            if _is_scattered(fusion, value, parts, has_sets):
                continue
            raise LoweringError(
                f"%{value.name} is streamed in chunks of {stream.chunks} rows of dim {stream.dim}",
                where=fusion.where(value.name),
                because=f"laid out as {layout}, the ranks have {sorted({*parts})} rows of that dim",
                hint="give lengths that add up to each rank's part, or a count of chunks",
            )
    return fusion


def _check_turning(fusion: Fusion, expr: Expr) -> None:
    """Raise LoweringError where chunks turn along one axis and rows in blocks move along others."""
    value = fusion.values[expr.outputs[0]]
    stream, after = value.stream, value.layout
    axis = stream.rotate if stream is not None else None
    is_empty = any(type(n) is int and n == 0 for n in value.shape)
    if axis is None or after is None or is_empty or after.mesh.axis_size(axis) == 1:
        return
    before = fusion.layout(expr.reads[0])
    if before.mesh != after.mesh or not moved(
        before.with_placement(axis, after.placement(axis)), after
    ):
        return
    raise LoweringError(
        f"%{value.name} is streamed with rotate={axis!r}, and laid out as {after} from {before}",
        where=fusion.where(value.name),
        because=f"all ranks exchange rows in blocks, and those along {axis} are at other chunks",
        hint="move the rows by a set without a stream first, and stream a set of that",
    )


def _is_scattered(fusion: Fusion, value: Value, parts: list[int], has_sets: bool) -> bool:
    """Return whether the chunks of a value are the chunks that a ring scatters."""
    stream, layout, expr = value.stream, value.layout, fusion.producers.get(value.name)
    assert stream is not None and layout is not None and isinstance(stream.chunks, tuple)
    if stream.rotate is None or stream.rotate not in layout.split_axes(stream.dim):
        return False
    if has_sets:
        if expr is None or expr.op != "set":
            return False
        extent = value.shape[stream.dim]
        if form(fusion.layout(expr.reads[0]), layout, stream, extent) != "ring_reduce":
            return False
    ring = layout.mesh.axis_size(stream.rotate)
    return all(n * ring == sum(stream.chunks) for n in parts)


def _check(fusion: Fusion, expr: Expr, name: str) -> None:
    """Raise LoweringError where the result cannot be computed in chunks of its streamed dim."""
    value = fusion.values[name]
    assert value.stream is not None
    dim, what = value.stream.dim, expr.op
    if len(expr.outputs) > 1:
        is_possible = False
        because = f"{expr.op} computes {len(expr.outputs)} results at once, and these whole"
        hint = f"stream a set of it: fd.ops.set({name}).on(..., stream=...)"
    elif expr.op == "reshape":
        what += f"{fusion.values[expr.reads[0]].shape} -> {value.shape}"
        is_possible = all(s is not None for s in operand_streams(expr, fusion.values))
        is_possible = is_possible and falls_together(expr, fusion.values)
        because, hint = _RESHAPED
    elif not falls_together(expr, fusion.values):
        is_possible = False
        because = f"{expr.op} reaches over rows of dim {dim}: a chunk is made of more than its own"
        hint = f"stream another dim, or a set of it: fd.ops.set({name}).on(..., stream=...)"
    else:
        is_possible = chunk_map(expr, fusion.values).result[dim] is not None
        because = f"{expr.op} needs dim {dim} as a whole"
        hint = "stream another dim, or leave stream= out: the result is the same"
    if not is_possible:
        raise LoweringError(
            f"%{value.name} = {what} is streamed over dim {dim}",
            where=fusion.where(value.name),
            because=because,
            hint=hint,
        )
