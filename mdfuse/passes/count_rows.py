"""Decide which ragged values are stored as the rows that are there, and which as dense tensors.

%s: f32[4,8,<=64:%n,16] (ep=S0) = group_rows(%x, %ids, %n)       64 rows for each part: %n are there

All values of the same counts are stored alike. They are dense where something asks for places that
no row has, or where rows would move otherwise than between parts and experts along one axis: then
zeros stand behind the rows, and travel with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Shard

name = "count_rows"

#: Operations on counted rows, besides elementwise ones and sets.
_ON_ROWS = (
    "group_rows", "ungroup_rows", "rows_mm", "rows_mm_grad", "sum_of_rows", "spread_rows",
    "mask_rows", "slice", "slice_grad", "cat", "sum", "detach",
)  # fmt: skip
#: Those that know in which order rows lie -> which of their operands the rows are.
_IN_ORDER = {"rows_mm": 0, "rows_mm_grad": 0, "sum_of_rows": 0, "spread_rows": 1}
#: Those that need the rows of a part on one rank.
_OF_TOKENS = ("group_rows", "ungroup_rows")


def run(fusion: Fusion, on: str = "host") -> Fusion:
    """Return the fusion with values of counted rows marked, each with its first counts.

    Args:
        fusion: with all sets.
        on: where ranks know the counts; see `mdfuse.Options.counts`.
    """
    values, capacities = dict(fusion.values), _capacities(fusion)
    for root, names in _by_counts(fusion).items():
        is_counted = _problem(fusion, root, names) is None
        each = capacities.get(root) if is_counted and on == "device" else None
        for x in names:
            values[x] = replace(values[x], rows=root, is_counted=is_counted, each=each)
    if values == fusion.values:
        return fusion
    return replace(fusion, values=values, exprs=tuple(_in_order(e, values) for e in fusion.exprs))


def _in_order(expr: Expr, values: Mapping[str, Value]) -> Expr:
    """Return an expression that knows in which order the rows lie that it reads."""
    if expr.op not in _IN_ORDER:
        return expr
    rows = values[expr.reads[_IN_ORDER[expr.op]]]
    attrs = {k: v for k, v in expr.attrs if k != "by_expert"}
    if rows.is_counted and lie_by_expert(rows.placed, rows.shape):
        attrs["by_expert"] = True
    return replace(expr, attrs=tuple(attrs.items()))


def lie_by_expert(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Return whether counted rows lie expert by expert: where experts are split.

    Elsewhere they lie part by part; with one part, or one expert, on each rank both are the same.
    """
    return bool(layout.split_axes(1)) and min(layout.local_shape(shape)[:2]) > 1


def _capacities(fusion: Fusion) -> dict[str, int]:
    """Return counts -> the most rows of a part for an expert, dropped or refused beyond."""
    limits = dict[str, int]()
    for e in fusion.exprs:
        if e.op == "group_rows":
            root = first(fusion, e.reads[2])
            producer = fusion.producers.get(root)
            stated = [e.kwargs["capacity"]] if "capacity" in e.kwargs else []
            if producer is not None and producer.op == "clamp":
                stated.append(producer.kwargs["max"])
            for n in stated:
                limits[root] = min(n, limits.get(root, n))
    return limits


def explained(fusion: Fusion, on: str = "host") -> Iterator[str]:
    """Yield a line for the rows of each counts of a fusion after all passes; `on`: see `run`."""
    for root, names in _by_counts(fusion).items():
        said = _of_dense(fusion, root, names)
        yield from said
        behind = ""
        if not said and on == "host":
            yield f"rows that %{root} counts are stored, and move, as they are counted in a run"
        elif not said:
            most, expected = _bytes_of_blocks(fusion, names)
            yield f"rows that %{root} counts move in blocks with room for all that there may be:"
            yield f"  {most} bytes reach a rank, {expected} are rows where experts are equally busy"
            once = fusion.values[root].stream is None
            behind = f", {'at their ends' if once else 'in each microbatch'}: the host waits there"
        if root in fusion.producers and fusion.producers[root].op == "clamp":
            most = fusion.producers[root].kwargs["max"]
            yield f"  rows over the capacity of {most} per part and expert are dropped"
        if root in fusion.capacities:
            most = fusion.capacities[root].kwargs["capacity"]
            what = f"runs with over {most} rows of a part for an expert"
            yield f"  all ranks refuse {what}{behind}"


def _bytes_of_blocks(fusion: Fusion, names: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of blocks that reach a rank, and of rows in them where parts are full.

    Experts are taken to be equally busy.
    """
    most, expected = 0, 0
    for e in fusion.exprs:
        if e.op != "set" or e.output not in names:
            continue
        before, after, value = (
            fusion.layout(e.reads[0]),
            fusion.layout(e.output),
            fusion.values[e.output],
        )
        axis, _ = way(before, after, value.shape) or ("", after)
        if axis:
            ranks, experts = before.mesh.axis_size(axis), value.shape[1]
            chunks = value.stream.count if value.stream is not None else 1
            row = after.local_shape(value.shape)[3] * value.dtype.itemsize
            rows = room = -(-value.shape[2] // chunks)
            if value.each is not None:
                room = min(rows, value.each * -(-experts // ranks))
            most += chunks * room * (ranks - 1) * row
            expected += chunks * min(rows * (ranks - 1) // ranks, room * (ranks - 1)) * row
    return most, expected


def dense(fusion: Fusion) -> Iterator[str]:
    """Yield a line for the rows of each counts that are dense after all passes."""
    for root, names in _by_counts(fusion).items():
        if said := _of_dense(fusion, root, names):
            yield ";".join(said).replace(";  ", "; ")


def _of_dense(fusion: Fusion, root: str, names: Sequence[str]) -> list[str]:
    values = [fusion.values[x] for x in names]
    if all(x.is_counted for x in values):
        return []
    problem = _problem(fusion, root, names) or "ranks compute leaves, by same_bits"
    most = max(x.bytes for x in values)
    return [
        f"rows that %{root} counts are dense, with zeros behind them: {problem}",
        f"  costs up to {most} bytes for a value of all ranks, which travel as they are",
    ]


def _by_counts(fusion: Fusion) -> dict[str, list[str]]:
    """Return counts, as they are first computed -> the values whose rows they count."""
    roots: dict[str, list[str]] = {}
    for value in fusion.values.values():
        if value.rows is not None:
            roots.setdefault(first(fusion, value.rows), []).append(value.name)
    return roots


def first(fusion: Fusion, value: str) -> str:
    """Return the value of which some value is a copy, in another layout or its own."""
    producer = fusion.producers.get(value)
    while producer is not None and producer.op == "set":
        (value,) = producer.reads
        producer = fusion.producers.get(value)
    return value


def _problem(fusion: Fusion, root: str, names: Sequence[str]) -> str | None:
    """Return why rows cannot be stored as they are counted; None where they can."""
    n = fusion.values.get(root)
    if n is None or n.layout is None:
        return "their counts have no layout"
    if n.stream is not None and n.stream.op != "sum":
        return "their counts are computed in chunks"
    for x in names:
        problem = _of_value(fusion.values[x], n)
        if problem is None and x in fusion.returned:
            problem = f"%{x} is an output, which is dense"
        if problem is not None:
            return problem
    ragged = {*names}
    touching = (e for e in fusion.exprs if not ragged.isdisjoint((*e.reads, *e.outputs)))
    problems = (_of_expr(e, fusion.values, ragged) for e in touching)
    return next((x for x in problems if x is not None), None)


def _of_value(value: Value, n: Value) -> str | None:
    layout = value.placed
    stream = value.stream
    is_of_rows = stream is None or (stream.dim == 2 and stream.rotate is None)
    is_alike = (stream is None) == (n.stream is None)
    if not (is_of_rows and is_alike) or layout.stream is not None or is_symbolic(value.shape):
        return f"%{value.name} is computed in chunks, or has extents that a run chooses"
    is_cut = any(d <= 2 for d in layout.cuts)
    if layout.split_axes(2) or is_cut or layout.mesh != n.placed.mesh:
        return f"%{value.name} is {layout}"
    return None


def _of_expr(e: Expr, values: Mapping[str, Value], ragged: set[str]) -> str | None:
    line = f" ({e.source})" if e.source else ""
    if e.op == "set":
        before, after = (values[x] for x in (e.reads[0], e.output))
        added = [a for a in before.placed.partial_axes if a not in after.placed.partial_axes]
        if added and after.placed.split_axes(1):
            by = ", ".join(added)
            return f"%{e.reads[0]} is added up along {by} before it goes back, as a bias asks{line}"
        if way(before.placed, after.placed, before.shape) is None:
            return f"%{e.output} goes from {before.placed} to {after.placed}{line}"
        return None
    if e.op in _OF_TOKENS:
        rows = values[e.output if e.op == "group_rows" else e.reads[0]]
        if rows.placed.split_axes(1):
            return f"each rank has its experts' rows of all tokens, %{rows.name}{line}"
        return None
    tensors = [x for x in e.reads if values[x].is_tensor]
    is_elementwise = TABLE[e.op].is_elementwise and ragged.issuperset(tensors)
    return None if is_elementwise or e.op in _ON_ROWS else f"{e.op} asks for all places{line}"


def way(before: Layout, after: Layout, shape: tuple[int, ...]) -> tuple[str, Layout] | None:
    """Return how rows move in a set: the axis of an all-to-all, and the layout on its other side.

    In that layout the rows of a part are on one rank, so that any other change is one of plain
    rows, [parts, bound, d]. The axis is "" where all of the set is; None where it is neither.
    """
    of_experts = before.split_axes(1), after.split_axes(1)
    if not any(of_experts) or before == after:
        return "", after
    if all(of_experts):
        return None
    split, whole = (after, before) if of_experts[1] else (before, after)
    (axis, *others) = split.split_axes(1)
    parts = split.with_placement(axis, Shard(0))
    is_innermost = not others and parts.split_axes(0)[-1:] == (axis,)
    is_there = parts.split_axes(0) == whole.split_axes(0)
    if not is_innermost or not is_there or parts.local_shape(shape)[0] > 1:
        return None
    return axis, parts
