"""Emit what an iteration of a host loop does of a set: its communication, and where that lands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mdfuse.communication import Communication
from mdfuse.extents.expressions import Index, Term, calc
from mdfuse.hir.emit.loop import Loop
from mdfuse.hir.emit.sets import Emitter, dense, emit_post, emit_steps, local
from mdfuse.hir.program import Instruction
from mdfuse.ir.graph import Expr
from mdfuse.layouts.layout import Layout, Partial
from mdfuse.layouts.stream import Stream
from mdfuse.layouts.streamed_sets import FORMS
from mdfuse.passes.segmentation import set_form
from mdfuse.reshard import Local, steps


def emit_set(loop: Loop, expr: Expr) -> None:
    how = set_form(loop.fusion, expr)
    assert how is not None
    _SETS[how](loop, expr)


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
    got = emit_steps(out, expr, current, before, after, shape, loop.landing(expr.output))
    _land(loop, expr, got)


def _land(loop: Loop, expr: Expr, got: str) -> None:
    """Put what arrived into its slice of the whole; without a whole, it is the chunk itself."""
    stream = loop.stream(expr.output)
    if not loop.is_whole(expr.output):
        loop.chunks[expr.output, stream.dim] = got
        return
    result = loop.result(expr.output)
    if _is_dense_slice(loop, expr.output, stream) and _post_into(loop.out, got, result):
        return
    loop.out.code.append(
        Instruction(op="set", fn="set", inputs=(got,), outputs=(result,), source=expr.source)
    )


def _is_dense_slice(loop: Loop, value: str, stream: Stream) -> bool:
    """Return whether the elements of a chunk lie side by side in the whole buffer."""
    order, shape = loop.order(value), loop.fusion.values[value].shape
    outer = order[: order.index(stream.dim)]
    return order == tuple(range(len(order))) and all(shape[d] == 1 for d in outer)


def _post_into(out: Emitter, got: str, result: str) -> bool:
    """Let a post deliver into the slice itself, and return whether that is possible.

    The chunk then needs no buffer of its own, and nothing is copied.
    """
    made = [at for at, i in enumerate(out.code) if got in i.outputs]
    if len(made) != 1 or out.code[made[0]].op != "alloc":
        return False
    (chunk,) = (i for i in out.code if result in i.outputs)
    kept = [i for i in out.code if i is not chunk]
    kept[made[0]] = chunk
    out.code[:] = [_with(i, got, result) for i in kept]
    del out.types[got]
    return True


def _with(i: Instruction, old: str, new: str) -> Instruction:
    return replace(i, inputs=tuple(new if x == old else x for x in i.inputs))


def _whole_source(loop: Loop, expr: Expr) -> str:
    """Return the operand as it was before the loop, in a dense buffer."""
    out = loop.out
    inside, out.code = out.code, loop.outside
    name = dense(out, expr.reads[0], expr.source)
    out.code = inside
    return name


def _emit_broadcast(loop: Loop, expr: Expr) -> None:
    """Append a broadcast of chunk i from rank i of the axis, which has it, to the others."""
    source, destination, _ = _layouts(loop, expr)
    (axis,) = (a for a, p in source.by_axis().items() if destination.placement(a) != p)
    _emit_arrival(loop, expr, "Broadcast", _whole_source(loop, expr), axis)


def _emit_exchange(loop: Loop, expr: Expr) -> None:
    """Append an exchange of what ranks lack of the chunk, or a slice where no rank lacks any."""
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
    """Return the position along the axis that is some steps on or back: as many as shards before.

    A loop that only scatters begins a step further, so that it ends with the rank's own shard.
    """
    step = loop.nth
    if loop.is_own_last:
        step = calc("+", step, 1)
    return calc("mod", calc(op, Term("coord", rotate), step), n)


def _piece(loop: Loop, value: str, name: str, expr: Expr) -> str:
    """Return the name of the piece of a rank's shard that an iteration is about."""
    if loop.pieces == 1:
        return name
    index = calc("mod", Term("index", loop.name), loop.pieces)
    kind, stream = loop.out.types[name], loop.stream(expr.output).of_shard(loop.pieces)
    assert kind.layout is not None
    layout = kind.layout.with_stream(stream.at(index))
    made = f"{value}.{loop.name}.piece"
    piece = loop.out.op("chunk", made, replace(kind, layout=layout), (name,), expr.source)
    if name in loop.out.dense and all(n == 1 for n in kind.shape[: stream.dim]):
        loop.out.dense.add(piece)  # rows that lie side by side
    return piece


def _emit_ring(loop: Loop, expr: Expr) -> None:
    """Append one step of a ring that passes parts on.

    Each rank receives what the rank i further on holds, and sends its own part to the rank i back.
    """
    source, _, stream = _layouts(loop, expr)
    assert stream.rotate is not None
    n, axis = source.mesh.axis_size(stream.rotate), stream.rotate
    whole = _whole_source(loop, expr)
    sent = dense(loop.out, _piece(loop, expr.reads[0], whole, expr), expr.source)
    type_ = loop.chunk_type(expr.output, stream)
    got = loop.out.op("alloc", loop.landing(expr.output), type_, (), expr.source)
    to, come = _position(loop, "-", axis, n), _position(loop, "+", axis, n)
    _emit_transfer(loop, expr, sent, to, got, come)
    _land(loop, expr, got)


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
    """Append a reduce of chunk i to rank i of the axis, whose part it is."""
    source, destination, stream = _layouts(loop, expr)
    (axis,) = (a for a, p in source.by_axis().items() if destination.placement(a) != p)
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
    out.post(comm, current, expr.output, expr.source)


def _emit_ring_reduce(loop: Loop, expr: Expr) -> None:
    """Append one step of a ring that adds up parts.

    Each rank sends its part of a chunk to the rank i further on, whose chunk it is. What comes to
    its own chunk it adds there; more than two parts of 16 bits it keeps, and adds up behind the
    loop: so each is moved once, and the sum is rounded once.
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
        got = out.op("alloc", name, out.types[y], (), expr.source)
    else:
        nth, whole = loop.nth, out.types[expr.output]
        term = out.op("select", f"{name}.term", whole, (terms,), expr.source, dim=0, index=nth)
        out.dense.add(term)
        got = _piece(loop, name, term, expr)
    to, come = _position(loop, "+", axis, n), _position(loop, "-", axis, n)
    _emit_transfer(loop, expr, current, to, got, come)
    if terms is None:
        first = Instruction(op="set", fn="set", inputs=(got,), outputs=(y,), source=expr.source)
        add = Instruction(op="binary", fn="add", inputs=(y, got), outputs=(y,), source=expr.source)
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
