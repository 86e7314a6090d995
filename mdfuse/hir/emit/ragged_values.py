"""Emit ragged values that are stored as the rows that a run counts.

    %s: f32[4,8,<=64:%n,16] (ep=S0) = group_rows(%x, %ids, %n)
    %r: f32[4,8,<=64:%n,16] (ep=S1) = set(%s)
->
    %n.all: i64[4,8] (ep=R) = ...                 # once: ranks that exchange rows know their counts
    %n.counted = fetch(%n.all, most=64)
    %s.lined: f32[1,64,16] of [4,64,16] (ep=S0) = line_up_rows(%x, %ids, %n, %ids.places)
    %s: f32[<=64:%n.counted,16] = pack_rows(%s.lined, %n.counted)
    %r: f32[<=256:%n.counted,16] = alloc(%n.counted)
    %c0 = post alltoall(%s) -> %r ... counts=%n.counted

Ranks of experts put rows in the order of these where they arrive, and back before they send them:

    %r.by_part: f32[<=256:%n.counted,16] = alloc(%n.counted)
    %c0 = post alltoall(%s) -> %r.by_part ... counts=%n.counted
    %r: f32[<=256:%n.counted,16] = rows_to_experts(%r.by_part, %r.n)

Where the host is not to know the counts, `%n.counted` is what ranks that exchange rows know, in the
memory of their devices, and they send blocks of as many rows as one may have for another:

    %r.sent: f32[1,2,64,16] of [4,2,64,16] (ep=S0) = unpack_rows(%s, %n.counted)
    %r.blocks: f32[4,1,64,16] of [4,2,64,16] (ep=S1) = ...                          # an all-to-all
    %r: f32[<=256:%n.counted,16] = pack_rows(%r.blocks, %n.counted)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from mdfuse.communication import Communication
from mdfuse.errors import Source
from mdfuse.hir.counted_rows import is_held
from mdfuse.hir.emit.sets import Emitter, emit_steps, local
from mdfuse.hir.program import BufferType, Instruction
from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.layouts.layout import Layout, Shard
from mdfuse.passes.count_rows import lie_by_expert, way


def emit_fetches(out: Emitter, names: Mapping[str, str]) -> None:
    """Bring counts to ranks that exchange rows, and to the host, where they are computed.

    Where a capacity is stated, all ranks know all counts, so that all of them refuse the same run.
    Where counts stay on the device, it is looked at behind the run; in loops where counts are.

    Args:
        out: the program under construction.
        names: values that are computed -> their names: in loops those of a chunk.
    """
    values = out.fusion.values
    for value, root in names.items():
        rows, stated = out.fusion.rows_by_counts.get(value), out.fusion.capacities.get(value)
        if rows is None and stated is None and not _is_cut_in_chunks(out.fusion, value):
            continue
        n, source = out.types[root], values[value].source
        axes = () if stated is not None else _axes_of_groups(out.fusion, value, n.placed)
        order = {0: axes} if axes else None
        held = Layout(n.placed.mesh, dict.fromkeys(axes, Shard(0)), order, n.placed.stream)
        on_device = out.counts == "device"
        known = _known(out, root)
        if on_device or held != n.placed:
            gather = Expr(op="set", inputs=(root,), outputs=(known,), source=source)
            emit_steps(out, gather, root, n.placed, held, n.shape, known)
        stays = rows is not None and on_device
        if stated is None and (rows is None or stays):
            continue
        kind = BufferType(dtype=torch.int64, shape=n.shape, layout=held)
        each = {} if stated is None else {"each": stated.kwargs["capacity"]}
        most = _most(rows, n.shape[1], **each)
        where = source if stated is None else stated.source
        name = f"{root}.checked" if on_device else counted(root)
        out.op("fetch", name, kind, (_held(out, root),), where, most=most, **each)
        if stays and values[value].stream is None:
            out.last.append(out.code.pop())


def _axes_of_groups(fusion: Fusion, value: str, layout: Layout) -> tuple[str, ...]:
    """Return the outermost axes along which no rank asks for parts of others: rows stay there."""
    asked = [v.layout for v in fusion.values.values() if v.rows == value]
    asked += [fusion.layout(e.output) for e in fusion.consumers[value] if e.op == "set"]
    axes = tuple(a for a in layout.split_axes(0) if layout.mesh.axis_size(a) > 1)
    while axes and not all(x is not None and is_held(axes, x) for x in (layout, *asked)):
        axes = axes[:-1]
    return axes


def _most(rows: Value | None, experts: int, each: int | None = None) -> int:
    """Return how many rows of a part there may be, or of a chunk of it."""
    mosts = [] if each is None else [each * experts]
    if rows is not None:
        chunks = 1 if rows.stream is None else rows.stream.count
        mosts.append(-(-rows.shape[2] // chunks))
    return min(mosts)


def counted(root: str) -> str:
    """Return the name of the counts by which rows are stored: numbers on the host, or a value."""
    return f"{root}.counted"


def _known(out: Emitter, root: str) -> str:
    """Return the name of counts that were brought to the ranks which exchange rows."""
    return f"{root}.all" if out.counts == "host" else counted(root)


def _held(out: Emitter, root: str) -> str:
    """Return the name of the counts of all rows that a rank holds."""
    known = _known(out, root)
    return known if known in out.types else root


def is_counted_expr(out: Emitter, expr: Expr) -> bool:
    """Tell whether an expression moves counted rows, or cuts counts that ranks know."""
    values = out.fusion.values
    if expr.op not in ("set", "group_rows", "ungroup_rows"):
        return False
    if any(values[x].is_counted for x in (*expr.outputs, *expr.reads)):
        return True
    (x,) = expr.reads[:1]
    is_cut = x in out.fusion.rows_by_counts or _is_cut_in_chunks(out.fusion, x)
    return expr.op == "set" and is_cut


def _is_cut_in_chunks(fusion: Fusion, value: str) -> bool:
    """Return whether a loop cuts counts of dense rows, each chunk of which is a term of a sum."""
    stream = fusion.values[value].stream
    if stream is None or stream.op != "sum":
        return False
    sets = (e for e in fusion.consumers[value] if e.op == "set")
    return any(fusion.values[e.output].stream == stream for e in sets)


def emit_counted(out: Emitter, expr: Expr, kind: BufferType) -> None:
    """Append what moves rows between tokens, parts and experts.

    Args:
        out: the program under construction.
        expr: a set, or an operation between tokens and rows, of names of the program.
        kind: of its result.
    """
    if expr.op == "set" and kind.counts is None:
        _cut_counts(out, expr, kind)
    elif expr.op == "group_rows":
        x = _name(out, f"{expr.output}.lined")
        out.types[x] = _plain(kind.layout, kind.shape, kind.dtype)
        out.code.append(local(_as(expr, "line_up_rows", expr.inputs, x)))
        _pack(out, x, expr.output, kind, expr.source)
    elif expr.op == "ungroup_rows":
        x = _unpack(out, expr.reads[0], expr.source)
        out.types[expr.output] = kind
        out.code.append(local(_as(expr, "put_back_rows", (x, *expr.inputs[1:]), expr.output)))
    else:
        _emit_set(out, expr, kind.layout)


def _emit_set(out: Emitter, expr: Expr, after: Layout | None) -> None:
    """Append an all-to-all of the rows, before or behind it changes of plain rows."""
    (operand,) = expr.reads
    before = out.types[operand].placed
    assert after is not None
    steps = way(before, after, out.types[operand].shape)
    assert steps is not None
    axis, parts = steps
    exchange = _exchange if out.counts == "host" else _exchange_blocks
    if not axis:
        _reshard(out, expr, operand, after, expr.output)
    elif after.split_axes(1):
        current = operand if before == parts else _reshard(out, expr, operand, parts, "")
        is_turned = lie_by_expert(after, out.types[operand].shape)
        name = _name(out, f"{expr.output}.by_part") if is_turned else expr.output
        exchange(out, expr, current, axis, (0, 1), after, name)
        if is_turned:
            _turn(out, expr, "rows_to_experts", name, expr.output)
    else:
        if lie_by_expert(before, out.types[operand].shape):
            name = _name(out, f"{operand}.by_part")
            operand = _turn(out, expr, "rows_to_parts", operand, name)
        name = expr.output if after == parts else _name(out, f"{expr.output}.parts")
        exchange(out, expr, operand, axis, (1, 0), parts, name)
        if after != parts:
            _reshard(out, expr, name, after, expr.output)


def _turn(out: Emitter, expr: Expr, op: str, operand: str, name: str) -> str:
    """Put the rows of experts in another order, by the counts of these; return the name."""
    kind = out.types[operand]
    assert kind.counts is not None
    held = _held(out, kind.counts.removesuffix(counted("")))
    (known, shape), of = (out.types[held].placed, out.types[held].shape), dict(kind.placed.splits)
    order: dict[int, tuple[str, ...]] = {d: of[d] for d in (0, 1) if d in of}
    splits = {a: Shard(d) for d, axes in order.items() for a in axes}
    layout, n = Layout(known.mesh, splits, order, known.stream), held
    if layout != known:
        n = _name(out, f"{name}.n")
        cut = Expr(op="set", inputs=(held,), outputs=(n,), source=expr.source)
        n = emit_steps(out, cut, held, known, layout, shape, n)
    out.types[name] = kind
    turn = Expr(op=op, inputs=(operand, n), outputs=(name,), source=expr.source)
    out.code.append(local(turn))
    return name


def _exchange(
    out: Emitter,
    expr: Expr,
    current: str,
    axis: str,
    dims: tuple[int, int],
    after: Layout,
    name: str,
) -> None:
    kind = out.types[current]
    assert kind.counts is not None
    comm = Communication(
        kind="AllToAll",
        source=kind.placed,
        destination=after,
        shape=kind.shape,
        dtype=kind.dtype,
        axes=(axis,),
        dim=dims[0],
        to_dim=dims[1],
    )
    out.op("alloc", name, replace(kind, layout=after), (kind.counts,), expr.source)
    out.post(comm, current, name, kind.counts, source=expr.source)


def _exchange_blocks(
    out: Emitter,
    expr: Expr,
    current: str,
    axis: str,
    _: tuple[int, int],
    after: Layout,
    name: str,
) -> None:
    """Append an exchange of as many rows as one rank may have for another."""
    kind = out.types[current]
    assert kind.counts is not None
    before, (parts, experts) = kind.placed, kind.shape[:2]
    groups, rows = before.mesh.axis_size(axis), before.local_shape(kind.shape)[2]
    if kind.each is not None:
        rows = min(rows, kind.each * -(-experts // groups))
    chunks = before.stream.count if before.stream is not None else 1
    shape = (parts, groups, rows * chunks, *kind.shape[3:])
    blocks = BufferType(dtype=kind.dtype, shape=shape, layout=before)
    sent, given = _name(out, f"{name}.sent"), (current, kind.counts)
    out.op("unpack_rows", sent, blocks, given, expr.source)
    there = emit_steps(out, expr, sent, before, after, shape, _name(out, f"{name}.blocks"))
    _pack(out, there, name, replace(kind, layout=after), expr.source)


def _reshard(out: Emitter, expr: Expr, current: str, after: Layout, name: str) -> str:
    """Bring rows, of whole parts, into another layout as plain rows; return the name."""
    kind = out.types[current]
    name = name or _name(out, f"{expr.output}.parts")
    if kind.placed == after:
        return out.op("set", name, kind, (current,), expr.source)
    plain = _unpack(out, current, expr.source)
    source, target = (_plain(x, kind.shape, kind.dtype).layout for x in (kind.placed, after))
    assert source is not None and target is not None
    shape = out.types[plain].shape
    there = emit_steps(out, expr, plain, source, target, shape, _name(out, f"{name}.lined"))
    into = replace(kind, layout=after)
    _pack(out, there, name, into, expr.source)
    return name


def _pack(out: Emitter, x: str, name: str, kind: BufferType, source: Source | None) -> None:
    out.types[name] = kind
    inputs = (x, kind.counts)
    out.code.append(Instruction(op="pack_rows", inputs=inputs, outputs=(name,), source=source))


def _unpack(out: Emitter, x: str, source: Source | None) -> str:
    kind = out.types[x]
    plain = _plain(kind.layout, kind.shape, kind.dtype)
    return out.op("unpack_rows", f"{x}.lined", plain, (x, kind.counts), source)


def _plain(layout: Layout | None, shape: tuple[int, ...], dtype: torch.dtype) -> BufferType:
    """Return the type of rows that are lined up, part by part: [parts, bound, d]."""
    assert layout is not None
    there = layout.with_dims({0: 0, 2: 1, 3: 2})
    return BufferType(dtype=dtype, shape=(shape[0], *shape[2:]), layout=there)


def _cut_counts(out: Emitter, expr: Expr, kind: BufferType) -> None:
    """Take a rank's part of the counts that it knows."""
    held = _held(out, expr.reads[0])
    layout = out.types[held].placed
    emit_steps(out, expr, held, layout, kind.placed, kind.shape, expr.output)


def _as(expr: Expr, op: str, inputs: tuple[object, ...], output: str) -> Expr:
    return Expr(op=op, inputs=inputs, outputs=(output,), attrs=expr.attrs, source=expr.source)  # type: ignore[arg-type]


def _name(out: Emitter, base: str) -> str:
    return fresh_name({**out.types, **out.fusion.values}, base)
