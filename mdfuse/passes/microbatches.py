"""Stream all values with the batch dim, and add up reductions over it.

    %h: f32[32,64] = linear(%x, %w)                    %h: … (stream(0,8)) = linear(%x, %w)
    %dw: f32[64,64] = linear(%dh^T, %x^T)      ->      %dw: … (stream(P(sum),8)) = linear(…)
    %new: f32[64,64] = sub(%w, %dw)                    %new: … = sub(%w, %dw)

One loop over microbatches then computes outputs and gradients; work on sums over the whole batch
follows the loop. The labels of the operations identify the batch dims.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from networkx.utils import UnionFind

from mdfuse.errors import RECOMPUTED, LoweringError
from mdfuse.extents.extent import comparable, example
from mdfuse.ir.dims import reduced_dims, reshape_groups
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.layouts.stream import JOINED, Stream
from mdfuse.layouts.streamed_sets import form
from mdfuse.passes import count_rows, decompose, drop_unread, one_row, room_for_rows
from mdfuse.passes.rewriting import rewritten
from mdfuse.passes.sharded import sum_rows
from mdfuse.passes.strategy import dim_map
from mdfuse.passes.streams import chunk_map, falls_together, one_dim, streamed_label, unit_stream

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
    same, roots = _dims(fusion, batch)
    is_added = partial(_adds_up, same=same, roots=roots)
    if ends := decompose.ends(fusion, is_added, is_settled=True):
        fusion = rewritten(fusion, ends)
        same, roots = _dims(fusion, batch)
    if inner := sum_rows.contractions(fusion, lambda view: _is_inner(fusion, view, same, roots)):
        fusion = drop_unread.run(rewritten(fusion, inner))
        same, roots = _dims(fusion, batch)
    fusion = room_for_rows.run(fusion, _rows(fusion, batch), count, lambda x: same[x, 0] in roots)
    values = _in_chunks(fusion, batch, count, same, roots)
    if has_one_row(fusion, batch) and (added := one_row.added_up(fusion, values)) is not None:
        fusion = added
        values = _in_chunks(fusion, batch, count, *_dims(fusion, batch))
    apart = [e for e in fusion.exprs if not falls_together(e, values)]
    if apart:
        rows = _rows(fusion, batch)
        values = {name: _in_lengths(value, rows) for name, value in values.items()}
        again = [e for e in fusion.exprs if e.op == "counts" and not falls_together(e, values)]
        _check_lengths(fusion, values, [*apart, *again], count)
    terms = _terms(fusion)
    for expr in fusion.exprs:
        for value in streamed(fusion, expr, values):
            values[value.name] = value
        if expr.op == "set" and expr.output in terms:
            values[expr.output] = replace(values[expr.output], stream=values[expr.reads[0]].stream)
        _check_terms(fusion, expr, values)
    for late in _behind(fusion, values):
        values[late] = replace(values[late], stream=None)
    return once(replace(fusion, values=values))


def cut(fusion: Fusion, batch: Mapping[str, int]) -> set[str]:
    """Return the values that have the dim of a batch; see `run`."""
    same, roots = _dims(fusion, batch)
    values = fusion.values.values()
    return {v.name for v in values if any(same[v.name, d] in roots for d in range(len(v.shape)))}


def _in_chunks(
    fusion: Fusion,
    batch: Mapping[str, int],
    count: int,
    same: UnionFind[tuple[str, int]],
    roots: Container[object],
) -> dict[str, Value]:
    """Return the values; those with the batch dim have its stream.

    Raises:
        LoweringError: some value has it twice.
    """
    values = dict(fusion.values)
    for name in (*fusion.inputs, *(name for e in fusion.exprs for name in e.outputs)):
        value = fusion.values[name]
        dims = [d for d in range(len(value.shape)) if same[name, d] in roots]
        if len(dims) > 1:
            raise _pairs(fusion, value, [(d, same[name, d]) for d in dims], batch, same)
        for dim in dims:
            cut = replace(value, stream=Stream(dim, count))
            if name in batch or _has_rows(fusion, cut, values):
                values[name] = cut
    return values


def _rows(fusion: Fusion, batch: Mapping[str, int]) -> int:
    """Return the number of rows of a batch; it may be symbolic."""
    return next(fusion.values[name].shape[dim] for name, dim in batch.items())


def has_one_row(fusion: Fusion, batch: Mapping[str, int]) -> bool:
    """Tell whether a batch has one row; of an extent that a run chooses, it is a guard then."""
    rows = _rows(fusion, batch)
    return example(rows) == 1 and rows == 1


def _dims(
    fusion: Fusion, batch: Mapping[str, int]
) -> tuple[UnionFind[tuple[str, int]], set[object]]:
    """Return the classes of equal dims, (name of a value, dim), and the classes of batch dims."""
    same: UnionFind[tuple[str, int]] = UnionFind()
    is_one = has_one_row(fusion, batch)
    for expr in fusion.exprs:
        if fusion.values[expr.outputs[0]].is_tensor:
            for first, *others in _same_dims(expr, fusion.values, is_one):
                same.union(first, *others)
    return same, {same[name, dim] for name, dim in batch.items()}


def _same_dims(
    expr: Expr, values: Mapping[str, Value], is_one: bool
) -> Iterable[list[tuple[str, int]]]:
    """Yield the dims of operands and results, as (value, dim), that are one dim of an operation.

    A batch of one row may be merged with the rows behind it, or part from them, and no label says
    so: the outermost dims of each group of a reshape are one then.
    """
    if expr.op != "reshape" or not is_one:
        return one_dim(expr, chunk_map(expr, values))
    (x,), y = expr.reads, expr.output
    groups = reshape_groups(values[x].shape, values[y].shape)
    return [[(x, old[0]), (y, new[0])] for old, new in groups]


def _has_rows(fusion: Fusion, value: Value, values: dict[str, Value]) -> bool:
    """Tell whether a value is computed whose rows along its stream follow from those of operands.

    A dim that an operation makes, as `unsqueeze` does, may meet a batch of one row; what reads the
    value cuts it then, as it does an input.
    """
    expr = fusion.producers.get(value.name)
    if expr is None or value.stream is None:
        return False
    if unit_stream(expr, ChainMap({value.name: value}, values)) is not None:
        return True
    at = expr.outputs.index(value.name)
    return chunk_map(expr, fusion.values).results[at][value.stream.dim] is not None


def _terms(fusion: Fusion) -> set[str]:
    """Return the values of which a chunk is read where the same chunk is computed: counts."""
    terms = set[str]()
    for expr in reversed(fusion.exprs):
        if fusion.values[expr.outputs[0]].is_tensor:
            terms.update(str(expr.inputs[at]) for at in dim_map(expr, fusion.values).terms)
        if expr.op == "set" and expr.output in terms:
            terms.update(expr.reads)
    return terms


def _check_terms(fusion: Fusion, expr: Expr, values: Mapping[str, Value]) -> None:
    """Raise LoweringError where chunks of rows are counted by what is no sum over chunks."""
    result = values[expr.outputs[0]]
    if result.stream is None or not result.is_tensor:
        return
    for at in dim_map(expr, values).terms:
        n = values[str(expr.inputs[at])]
        if n.stream is None or n.stream.op != "sum":
            of = fusion.producers.get(count_rows.first(fusion, n.name))
            if of is not None and of.op == "counts":
                raise _refused(fusion, result, *room_for_rows.problem(fusion, of))
            because = f"%{n.name} says how many rows of the whole batch there are, not of each part"
            raise _refused(fusion, result, because, hint=f"leave drop=True out, or {_AT_ONCE}")


def _adds_up(
    fusion: Fusion, expr: Expr, same: UnionFind[tuple[str, int]], roots: Container[object]
) -> bool:
    """Tell whether a reduction gives up the batch's dim."""
    (x,) = expr.reads
    dims = reduced_dims(expr.kwargs.get("dims"), len(fusion.values[x].shape))
    return any(same[x, d] in roots for d in dims)


def _is_inner(
    fusion: Fusion, view: Expr, same: UnionFind[tuple[str, int]], roots: Container[object]
) -> bool:
    """Tell whether a view of rows makes one of the batch's dim and some before it."""
    (x,) = view.reads
    inner = range(1, len(fusion.values[x].shape) - 1)
    return any(same[x, d] in roots for d in inner) and same[view.output, 0] not in roots


def _in_lengths(value: Value, rows: object) -> Value:
    """Return a value in chunks of given lengths, that each have whole rows of the batch.

    `torch.chunk` cuts 5 rows of the batch into 3 and 2, but 20 rows and positions into 10 and 10.

    Args:
        value: in as many chunks as there are microbatches; it stays so where rows are no numbers,
            or ranks have other numbers of them.
        rows: of the batch.
    """
    stream, layout = value.stream, value.layout
    if stream is None or layout is None or not isinstance(rows, int):
        return value
    extent = value.shape[stream.dim]
    if not isinstance(extent, int) or not rows or extent % rows:
        return value
    each, parts = extent // rows, {b - a for _, (a, b) in layout.chunks_of(stream.dim, extent)}
    if len(parts) > 1 or max(parts) % each:
        return value
    cuts = (stream.interval((0, max(parts) // each), i) for i in range(stream.count))
    return replace(value, stream=Stream(stream.dim, tuple(each * (b - a) for a, b in cuts)))


def _check_lengths(
    fusion: Fusion, values: Mapping[str, Value], apart: Sequence[Expr], count: int
) -> None:
    """Raise LoweringError unless the chunks of some expressions have known lengths."""
    for expr in apart:
        (*_, result) = names = (*expr.reads, *expr.outputs)
        stream = values[result].stream
        if chunk_map(expr, values).reaches:
            because = f"{expr.op} reaches over rows of the batch: a microbatch lacks some"
            raise _refused(fusion, values[expr.outputs[0]], because)
        if expr.op in room_for_rows.OF_TOKENS:
            raise _refused(fusion, values[expr.output], *room_for_rows.problem(fusion, expr))
        if expr.op != "reshape" or stream is None or isinstance(stream.chunks, int):
            shapes = " and ".join(str(list(values[x].shape)) for x in names)
            raise _refused(
                fusion,
                values[expr.outputs[0]],
                f"{count} microbatches do not fall together in {shapes} of {expr.op}",
                hint=f"choose as many as divide the rows of each rank, or {_AT_ONCE}",
            )


def once(fusion: Fusion, is_near: Callable[[str], bool] = lambda _: True) -> Fusion:
    """Return the fusion without recomputation that is the same for all microbatches.

    The loop would come after both: what a backward gathers again is there from the forward.

    Args:
        fusion: with streams.
        is_near: whether the loop is near a value that is computed again.
    """
    values, exprs, known = dict(fusion.values), list[Expr](), dict[object, tuple[str, ...]]()
    instead: dict[str, str] = {}
    for expr in fusion.exprs:
        expr = expr.reading(instead)
        where = tuple((values[n].layout, values[n].dtype) for n in expr.outputs)
        key = comparable((expr.op, expr.inputs, expr.attrs, where))
        is_whole = all(values[name].stream is None for name in expr.outputs)
        is_again = expr.note == RECOMPUTED
        if is_whole and is_again and key in known and all(map(is_near, expr.outputs)):
            instead.update(zip(expr.outputs, known[key], strict=True))
            for name in expr.outputs:
                del values[name]
            continue
        if is_whole:
            known.setdefault(key, expr.outputs)
        exprs.append(expr)
    return replace(fusion, values=values, exprs=tuple(exprs))


def streamed(fusion: Fusion, expr: Expr, values: Mapping[str, Value]) -> Iterator[Value]:
    """Yield results whose stream does not follow from their dims: added up, or whole.

    Raises:
        LoweringError: the expression needs the batch as a whole.
    """
    results = [values[name] for name in expr.outputs]
    if not results[0].is_tensor:
        return
    if unit_stream(expr, values) is not None:
        return
    labels = chunk_map(expr, values)
    batch = streamed_label(expr, labels, values)
    if batch is None:
        if any(_is_read(x, values) for x in expr.inputs):
            raise _needs_whole(fusion, results[0], expr, values)
        return
    for x, dims in zip(expr.inputs, labels.operands, strict=True):
        stream = values[x].stream if isinstance(x, str) else None
        if stream is not None and stream.op is None and dims[stream.dim] != batch:
            dim = f"%{x}, whose dim {stream.dim} is the batch's"
            raise _refused(fusion, results[0], f"for each microbatch {expr.op} needs all of {dim}")
    for value, dims in zip(results, labels.results, strict=True):
        if batch in dims:
            if expr.op == "set" and not is_cut(fusion, expr, value):
                yield replace(value, stream=None)
            continue
        op = labels.reduces.get(batch)
        if op not in JOINED:
            raise _needs_whole(fusion, value, expr, values)
        cut = (values[x].stream for x in (*expr.reads, *expr.outputs) if _is_read(x, values))
        (chunks,) = {stream.chunks for stream in cut if stream is not None}
        yield replace(value, stream=Stream.over(op, chunks))


def _behind(fusion: Fusion, values: Mapping[str, Value]) -> set[str]:
    """Return the values that follow from a whole batch and lead to nothing computed in chunks.

    Ranks bring a batch together where a set gives its rows to other ranks. What follows is computed
    at once, as the cast behind a set in a wide dtype: in the loop it would wait for all
    microbatches.
    """
    late, follows = set[str](), dict[str, Expr]()
    for expr in fusion.exprs:
        is_late = not late.isdisjoint(expr.reads)
        is_whole = all(values[x].stream is None for x in expr.outputs)
        if is_late or (is_whole and any(_is_read(x, values) for x in expr.reads)):
            late.update(expr.outputs)
        if is_late and not is_whole:
            follows.update(dict.fromkeys(expr.outputs, expr))
    chunks = {name for name in values if values[name].stream is not None}
    while wrong := [x for x, e in follows.items() if _meets(fusion, e, chunks - follows.keys())]:
        for x in wrong:
            del follows[x]
    return {*follows}


def _meets(fusion: Fusion, expr: Expr, names: Container[str]) -> bool:
    """Return whether an expression reads some of these values, or leads to one in one step."""
    readers = (r for x in expr.outputs for r in fusion.consumers[x])
    near = (*expr.reads, *(x for e in (expr, *readers) for x in e.outputs))
    return any(x in names for x in near)


def _is_read(x: object, values: Mapping[str, Value]) -> bool:
    stream = values[x].stream if isinstance(x, str) else None
    return stream is not None and stream.op is None


def is_cut(fusion: Fusion, expr: Expr, value: Value) -> bool:
    """Return whether a set goes chunk by chunk; else it goes whole, and what is around it."""
    assert value.stream is not None
    extent = value.shape[value.stream.dim]
    return form(fusion.layout(expr.reads[0]), value.placed, value.stream, extent) == "chunks"


def _needs_whole(
    fusion: Fusion, value: Value, expr: Expr, values: Mapping[str, Value]
) -> LoweringError:
    """Say which dim an operation needs as a whole."""
    read = ((x, values[x].stream) for x in expr.reads if _is_read(x, values))
    x, stream = next(read, (None, None))
    dim = f"dim {stream.dim} of %{x}, the batch's," if stream is not None else "the batch's dim"
    hint = _MERGED if expr.op == "reshape" else _ANOTHER
    return _refused(fusion, value, f"{expr.op} needs {dim} as a whole", hint)


def _pairs(
    fusion: Fusion,
    value: Value,
    pairs: Sequence[tuple[int, object]],
    batch: Mapping[str, int],
    same: UnionFind[tuple[str, int]],
) -> LoweringError:
    """Say how several dims of a value are the batch's.

    Args:
        fusion: whose value it is.
        value: with several of them.
        pairs: those dims, with what they are the same as.
        batch: input -> its dim that is the batch's.
        same: which dims are the same.
    """
    of = {
        root: [f"{d} of %{x}" for x, d in batch.items() if same[x, d] == root] for _, root in pairs
    }
    if len(of) > 1:
        shared_dims = (f"its dim {d} is dim {' and '.join(of[root])}" for d, root in pairs)
        hint = "name in batch= the inputs whose rows are samples; weights have none"
        return _refused(fusion, value, ", ".join(shared_dims) + ", all of which batch= names", hint)
    dims = " and ".join(str(d) for d, _ in pairs)
    because = f"its dims {dims} are both the batch's: each sample meets all others"
    return _refused(fusion, value, because)


_AT_ONCE = "take the batch at once: mf.compile(definition)"
_ANOTHER = f"name another dim in batch=, or {_AT_ONCE}"
_MERGED = f"let the batch be the first of the dims that are merged, or {_AT_ONCE}"


def _refused(fusion: Fusion, value: Value, because: str, hint: str = _ANOTHER) -> LoweringError:
    return LoweringError(
        f"%{value.name} cannot be computed in microbatches",
        where=fusion.where(value.name),
        because=because,
        hint=hint,
    )
