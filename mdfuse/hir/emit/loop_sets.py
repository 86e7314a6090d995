"""Emit the part of a set in one iteration of a host loop: its communication and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mdfuse.communication import Communication
from mdfuse.extents.expressions import Index, Term, calc
from mdfuse.hir.emit.loop import Loop
from mdfuse.hir.emit.sets import Emitter, copy_into, dense, emit_post, emit_steps, local
from mdfuse.hir.program import Instruction
from mdfuse.ir.graph import Expr
from mdfuse.layouts.layout import Layout, Partial
from mdfuse.layouts.stream import Stream
from mdfuse.layouts.streamed_sets import FORMS
from mdfuse.passes.segmentation import set_form
from mdfuse.reshard import Local, steps


def emit_set(loop: Loop, expr: Expr) -> None:
    form = set_form(loop.fusion, expr)
    assert form is not None
    _SETS[form](loop, expr)


def _layouts(loop: Loop, expr: Expr) -> tuple[Layout, Layout, Stream]:
    source, destination = loop.fusion.layout(expr.reads[0]), loop.fusion.layout(expr.output)
    return source, destination, loop.stream(expr.output)


def _emit_chunks(loop: Loop, expr: Expr) -> None:
    """Append a set of a chunk, which changes its layout as the whole would."""
    source, destination, stream = _layouts(loop, expr)
    out, (operand,) = loop.out, expr.reads
    current = loop.read(operand, stream)
    if source == destination:
        result = loop.result(expr.output)
        out.code.append(replace(local(expr), inputs=(current,), outputs=(result,)))
        return
    before, after = (loop.chunk_layout(x, stream) for x in (source, destination))
    shape = loop.fusion.values[operand].shape
    landed = emit_steps(out, expr, current, before, after, shape, loop.landing(expr.output))
    _land(loop, expr, landed)


def _land(loop: Loop, expr: Expr, landed: str) -> None:
    """Put a received chunk into its slice of the whole value, if there is a whole value."""
    stream = loop.stream(expr.output)
    if not loop.is_whole(expr.output):
        loop.chunks[expr.output, stream.dim] = landed
        return
    result = loop.result(expr.output)
    if _is_dense_slice(loop, expr.output, stream) and _post_into(loop.out, landed, result):
        return
    loop.out.code.append(copy_into(landed, result, expr.source))


def _is_dense_slice(loop: Loop, value: str, stream: Stream) -> bool:
    """Return whether the elements of a chunk lie side by side in the whole buffer."""
    order, shape = loop.order(value), loop.fusion.values[value].shape
    outer = order[: order.index(stream.dim)]
    return order == tuple(range(len(order))) and all(shape[d] == 1 for d in outer)


def _post_into(out: Emitter, landed: str, result: str) -> bool:
    """Let a post deliver into the slice itself, and return whether that is possible.

    The chunk then needs no buffer of its own, and nothing is copied.
    """
    writers = [i for i in out.code if landed in i.outputs]
    if [i.op for i in writers] != ["alloc"]:
        return False
    (slice_,) = (i for i in out.code if result in i.outputs)
    code = [slice_ if i is writers[0] else i for i in out.code if i is not slice_]
    out.code[:] = [i.renamed({landed: result}) for i in code]
    del out.types[landed]
    return True


def _whole_source(loop: Loop, expr: Expr) -> str:
    """Return the operand as it was before the loop, in a dense buffer."""
    out = loop.out
    inside, out.code = out.code, loop.outside
    name = dense(out, expr.reads[0], expr.source)
    out.code = inside
    return name


def _changed(source: Layout, destination: Layout) -> list[str]:
    """Return the axes along which two layouts differ."""
    return [a for a, p in source.by_axis().items() if destination.placement(a) != p]


def _emit_broadcast(loop: Loop, expr: Expr) -> None:
    """Append a broadcast of chunk i from its owner, rank i of the axis."""
    source, destination, _ = _layouts(loop, expr)
    (axis,) = _changed(source, destination)
    _emit_arrival(loop, expr, "Broadcast", _whole_source(loop, expr), axis)


def _emit_exchange(loop: Loop, expr: Expr) -> None:
    """Append an exchange of the missing parts of a chunk, or a slice if no rank misses any."""
    source, destination, stream = _layouts(loop, expr)
    (operand,), shape = expr.reads, loop.fusion.values[expr.output].shape
    if not all(isinstance(step, Local) for step in steps(source, destination, shape)):
        _emit_arrival(loop, expr, "Exchange", operand, None)
        return
    name, kind = loop.landing(expr.output), loop.chunk_type(expr.output, stream)
    op, operands = ("alloc", ()) if 0 in shape else ("narrow", (operand,))
    _land(loop, expr, loop.out.op(op, name, kind, operands, expr.source))


def _emit_arrival(loop: Loop, expr: Expr, kind: str, current: str, axis: str | None) -> None:
    source, destination, stream = _layouts(loop, expr)
    value = loop.fusion.values[expr.output]
    comm = Communication(
        kind=kind,
        source=source,
        destination=loop.chunk_layout(destination, stream),
        shape=value.shape,
        dtype=value.dtype,
        axes=(axis,) if axis is not None else (),
    )
    name, type_ = loop.landing(expr.output), loop.chunk_type(expr.output, stream)
    _land(loop, expr, emit_post(loop.out, comm, current, type_, name, expr.source))


def _position(loop: Loop, op: str, rotate: str, n: int) -> Index:
    """Return the position of a peer along the axis: `nth` steps on (op "+") or back ("-").

    A loop that only scatters begins a step further, so that it ends with the rank's own shard.
    """
    step = loop.nth
    if loop.is_own_last:
        step = calc("+", step, 1)
    return calc("mod", calc(op, Term("coord", rotate), step), n)


def _piece(loop: Loop, value: str, name: str, expr: Expr) -> str:
    """Return the name of the piece of a rank's shard that an iteration moves."""
    if loop.pieces == 1:
        return name
    index = calc("mod", Term("index", loop.name), loop.pieces)
    kind, stream = loop.out.types[name], loop.stream(expr.output).of_shard(loop.pieces)
    layout = kind.placed.with_stream(stream.at(index))
    kind = replace(kind, layout=layout)
    piece = loop.out.op("chunk", f"{value}.{loop.name}.piece", kind, (name,), expr.source)
    if name in loop.out.dense and all(n == 1 for n in kind.shape[: stream.dim]):
        loop.out.dense.add(piece)  # adjacent rows
    return piece


def _emit_ring(loop: Loop, expr: Expr) -> None:
    """Append one step of a ring all-gather.

    Each rank receives the shard of the rank i further on, and sends its own shard to the rank i
    back.
    """
    source, _, stream = _layouts(loop, expr)
    assert stream.rotate is not None
    n, axis = source.mesh.axis_size(stream.rotate), stream.rotate
    whole = _whole_source(loop, expr)
    sent = dense(loop.out, _piece(loop, expr.reads[0], whole, expr), expr.source)
    type_ = loop.chunk_type(expr.output, stream)
    landed = loop.out.op("alloc", loop.landing(expr.output), type_, (), expr.source)
    to, come = _position(loop, "-", axis, n), _position(loop, "+", axis, n)
    _emit_transfer(loop, expr, sent, to, landed, come)
    _land(loop, expr, landed)


def _emit_transfer(
    loop: Loop, expr: Expr, sent: str, to: Index, received: str, come: Index
) -> None:
    """Append a send and a receive that are posted together, and their waits."""
    out, stream = loop.out, loop.stream(expr.output)
    handles = [out.handle(), out.handle()]
    along = ("axis", stream.rotate)
    send = Instruction(op="send", inputs=(sent,), attrs=(("to", to), along))
    recv = Instruction(op="recv", inputs=(received,), attrs=(("from", come), along))
    rows = [
        Instruction(op="group_start"),
        replace(send, outputs=(handles[0],), source=expr.source),
        replace(recv, outputs=(handles[1],), source=expr.source),
        Instruction(op="group_end"),
        *(Instruction(op="wait", inputs=(h,), source=expr.source) for h in handles),
    ]
    out.code += rows


def _emit_reduce(loop: Loop, expr: Expr) -> None:
    """Append a reduce of chunk i to its owner, rank i of the axis."""
    source, destination, stream = _layouts(loop, expr)
    (axis,) = _changed(source, destination)
    placement = source.placement(axis)
    assert isinstance(placement, Partial)
    out, value = loop.out, loop.fusion.values[expr.output]
    current = dense(out, loop.read(expr.reads[0], stream), expr.source)
    loop.allocate(expr.output, is_posted=True)
    comm = Communication(
        kind="Reduce",
        source=loop.chunk_layout(source, stream),
        destination=destination,
        shape=value.shape,
        dtype=value.dtype,
        axes=(axis,),
        reduce_op=placement.op,
    )
    out.post(comm, current, expr.output, source=expr.source)


def _emit_ring_reduce(loop: Loop, expr: Expr) -> None:
    """Append one step of a ring reduce-scatter.

    Each rank sends its term of a chunk to the owner of the chunk, the rank i further on, which adds
    it up. An owner stores more than two terms of 16 bits, and adds them up behind the loop, so that
    the sum is rounded once.
    """
    source, _, stream = _layouts(loop, expr)
    assert stream.rotate is not None
    out, n, axis = loop.out, source.mesh.axis_size(stream.rotate), stream.rotate
    current = dense(out, loop.read(expr.reads[0], stream), expr.source)
    loop.allocate(expr.output)
    terms = loop.terms(expr.output, n, expr) if n > 2 else None
    name, index = f"{expr.output}.{loop.name}.recv", Term("index", loop.name)
    if terms is None:
        y = _piece(loop, expr.output, expr.output, expr)
        landed = out.op("alloc", name, out.types[y], (), expr.source)
    else:
        nth, whole = loop.nth, out.types[expr.output]
        term = out.op("select", f"{name}.term", whole, (terms,), expr.source, dim=0, index=nth)
        out.dense.add(term)
        landed = _piece(loop, name, term, expr)
    to, come = _position(loop, "+", axis, n), _position(loop, "-", axis, n)
    _emit_transfer(loop, expr, current, to, landed, come)
    if terms is None:
        first = copy_into(landed, y, expr.source)
        add = replace(first, op="binary", fn="add", inputs=(y, landed))
        test = calc("<", index, loop.pieces) if loop.pieces > 1 else calc("==", index, 0)
        out.code.append(Instruction(op="if", attrs=(("test", test),), body=(first,), orelse=(add,)))


#: form -> the function that emits a set of that form.
_SETS: dict[str, Callable[[Loop, Expr], None]] = {
    "chunks": _emit_chunks,
    "broadcast": _emit_broadcast,
    "ring": _emit_ring,
    "exchange": _emit_exchange,
    "reduce": _emit_reduce,
    "ring_reduce": _emit_ring_reduce,
}
assert _SETS.keys() == FORMS.keys()
