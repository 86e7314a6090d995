"""Emit host loops over stream chunks: which segments share a loop, and what an iteration does.

    %y: f32[8,4] (tp=R, stream(0,4)) = add(%x, 1.0)
->
    %y: f32[8,4] (tp=R) = alloc
    for %i in 0..4 {
      %x.i: f32[2,4] of [8,4] (tp=R, chunk(0,4,%i)) = chunk(%x)
      %y.i: f32[2,4] of [8,4] (tp=R, chunk(0,4,%i)) = chunk(%y)
      %y.i = add(%x.i, 1.0)
    }

A value that only its own loop reads is never whole: an iteration binds its chunk and forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx
import torch

from mdfuse.communication import Communication
from mdfuse.extents.expressions import Index, Term, calc, loop
from mdfuse.hir.emit.sets import Emitter, dense, emit_post, emit_steps, local, value_type
from mdfuse.hir.program import BufferType, Instruction
from mdfuse.ir.graph import Expr, Fusion, Operand, fresh_name
from mdfuse.layouts.layout import Layout, Partial
from mdfuse.layouts.stream import Stream
from mdfuse.layouts.streamed_sets import FORMS
from mdfuse.passes.segmentation import HostLoops, Section, set_form, streams_read
from mdfuse.reshard import Local, steps


def loops(fusion: Fusion, segments: Iterable[Section]) -> list[list[Section]]:
    """Group segments: neighbours that share a host loop together, all others by themselves.

    Args:
        fusion: after all passes.
        segments: its sections, in order.
    """
    found: list[list[Section]] = []
    host_loops = HostLoops(fusion)
    streams = [v.stream for v in fusion.values.values() if v.stream is not None]
    if any(stream.op is not None for stream in streams):
        return _gathered(list(segments), host_loops)
    for section in segments:
        last = [e for p in found[-1] for e in p.exprs] if found else []
        if last and section.is_streamed and host_loops.may_share(last, section.exprs):
            found[-1].append(section)
        else:
            found.append([section])
    return found


def _gathered(sections: list[Section], host_loops: HostLoops) -> list[list[Section]]:
    """Group sections into as few loops as there can be, wherever they stand, in a new order.

    What sections read says which may share a loop: none of them waits, by way of one outside, for
    all that the loop adds up. Each goes with the last that it can: where a loop must come first, as
    one that counts does, what the others compute is in the loop that uses it.
    """
    owner = {name: n for n, s in enumerate(sections) for e in s.exprs for name in e.outputs}
    edges = {(owner[x], n) for n, s in enumerate(sections) for x in s.inputs if x in owner}
    readers: dict[int, list[int]] = {n: [] for n in range(len(sections))}
    for n, k in sorted(edges):
        readers[n].append(k)
    found: dict[int, list[int]] = {}
    home: dict[int, int] = {}
    #: section, or loop by its last section -> the loops that wait for it
    before: dict[int, set[int]] = {}
    for n in reversed(range(len(sections))):
        waiting = {k: {home[k]} if k in home else before[k] for k in readers[n]}
        for m in found if sections[n].is_streamed else ():
            outside = set().union(*(loops for k, loops in waiting.items() if home.get(k) != m))
            near = [sections[k] for k in (m, *readers[n]) if home.get(k) == m]
            exprs = [e for s in near for e in s.exprs]
            if m not in _behind(outside, before) and host_loops.may_share(sections[n].exprs, exprs):
                home[n] = m
                break
        if sections[n].is_streamed:
            found.setdefault(home.setdefault(n, n), []).insert(0, n)
        at = home.get(n, n)
        before.setdefault(at, set()).update(*waiting.values())
        before[at].discard(at)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(home.get(n, n) for n in range(len(sections)))
    ends = ((home.get(n, n), home.get(k, k)) for n, k in edges)
    graph.add_edges_from((a, b) for a, b in ends if a != b)
    order = nx.lexicographical_topological_sort(graph)
    return [[sections[k] for k in found.get(n, [n])] for n in order]


def _behind(loops: set[int], before: dict[int, set[int]]) -> set[int]:
    """Return loops, and all that wait for them."""
    found, new = set[int](), set(loops)
    while new:
        found |= new
        new = set().union(*(before[m] for m in new)) - found
    return found


#: Parts of these dtypes are added up in f32.
_WIDENED = (torch.float16, torch.bfloat16)


@dataclass
class Loop:
    """One host loop under construction, within one call of `emit_loop`."""

    out: Emitter
    #: what the program has before the loop
    outside: list[Instruction]
    #: the loop's index, and the chunk that this rank is at
    name: str
    index: Index
    #: the values that it computes
    made: frozenset[str]
    #: (value, dim) -> the name of its chunk
    chunks: dict[tuple[str, int], str] = field(default_factory=dict)
    #: what comes right behind the loop
    behind: list[Instruction] = field(default_factory=list)

    @property
    def fusion(self) -> Fusion:
        return self.out.fusion

    def chunk_type(self, value: str, stream: Stream) -> BufferType:
        """Return the type of a chunk of a value, which names the loop's index."""
        kind = value_type(self.fusion.values[value])
        assert kind.layout is not None
        here = replace(stream, rotate=None, index=self.index)
        return replace(kind, layout=kind.layout.with_stream(here))

    def read(self, value: str, stream: Stream | None) -> str:
        """Return the name under which an iteration reads a value: of its chunk, or of the whole."""
        if stream is None:
            return value
        key = value, stream.dim
        if key not in self.chunks:
            kind = self.chunk_type(value, stream)
            self.chunks[key] = self.out.op("chunk", f"{value}.{self.name}", kind, (value,))
        return self.chunks[key]

    def is_whole(self, value: str) -> bool:
        """Return whether a value is needed after the loop, or by other loops."""
        if value in self.fusion.outputs:
            return True
        return any(r.outputs[0] not in self.made for r in self.fusion.consumers[value])

    def result(self, value: str) -> str:
        """Return the name that an iteration computes of a value: a slice of the whole if kept."""
        if not self.is_whole(value):
            return self.chunk(value)
        self.allocate(value)
        return self.read(value, self.stream(value))

    def chunk(self, value: str) -> str:
        """Return a new name for a chunk of a value."""
        stream = self.stream(value)
        name = self.out.new(f"{value}.{self.name}", self.chunk_type(value, stream))
        self.chunks[value, stream.dim] = name
        return name

    def stream(self, value: str) -> Stream:
        """Return the stream of a value that the loop computes."""
        stream = self.fusion.values[value].stream
        assert stream is not None
        return stream

    def landing(self, value: str) -> str:
        """Return the name of the buffer in which a chunk of a value arrives."""
        name = f"{value}.{self.name}"
        return fresh_name(self.out.types, f"{name}.new" if self.is_whole(value) else name)

    def order(self, value: str) -> tuple[int, ...]:
        """Return the memory order of a whole value: the plain one for a set's result, else its own.

        So chunks may arrive in their places. An order that the user requires stays.
        """
        kind = self.fusion.values[value]
        is_set = self.fusion.producers[value].op == "set"
        return (
            tuple(range(len(kind.shape))) if is_set and not kind.is_order_required else kind.order
        )

    def allocate(self, value: str, is_posted: bool = False) -> None:
        """Append the buffer of a whole value before the loop; plain if it is posted as a whole."""
        kind = self.fusion.values[value]
        self.out.types[value] = value_type(kind)
        order: tuple[int, ...] | None = self.order(value)
        if is_posted or order == tuple(range(len(kind.shape))):
            if value not in self.fusion.reuse:  # those lie as the caller's tensors do
                self.out.dense.add(value)
            order = None
        self.outside.append(
            Instruction(op="alloc", outputs=(value,), order=order, source=kind.source)
        )

    def accumulate(self, value: str, part: str, expr: Expr) -> None:
        """Append what adds the part of this iteration to a value; in f32 where it has 16 bits."""
        kind, op = self.fusion.values[value], self.stream(value).op
        buffer = value
        if kind.dtype in _WIDENED and op in ("sum", "prod"):
            buffer = self.out.new(f"{value}.{op}", replace(value_type(kind), dtype=torch.float32))
            self.outside.append(Instruction(op="alloc", outputs=(buffer,), source=kind.source))
            self.out.types[value] = value_type(kind)
            fn = "round_terms" if kind.layout and kind.layout.partial_axes else "cast"
            cast = Expr(op=fn, inputs=(buffer,), outputs=(value,), attrs=(("dtype", kind.dtype),))
            self.behind.append(replace(local(cast), source=expr.source))
        else:
            self.allocate(value)
        self.out.code.append(
            Instruction(op="accumulate", inputs=(part,), outputs=(buffer,), source=expr.source)
        )

    def chunk_layout(self, layout: Layout, stream: Stream) -> Layout:
        return layout.with_stream(Stream(stream.dim, stream.chunks, None, self.index))


def emit_loop(out: Emitter, sections: Sequence[Section]) -> None:
    """Append a loop that computes the values of some streamed segments.

    Args:
        out: what is built, with the code that comes before the loop.
        sections: neighbouring segments of one stream, as `loops` groups them.
    """
    building, stream = begin_loop(out, sections)
    for section in sections:
        emit_section(building, section)
    body, out.code = tuple(out.code), building.outside
    over, source = (("start", 0), ("stop", stream.count), ("step", 1)), sections[0].exprs[0].source
    out.code.append(
        Instruction(op="for", outputs=(building.name,), attrs=over, body=body, source=source)
    )
    out.code += building.behind


def begin_loop(out: Emitter, sections: Sequence[Section]) -> tuple[Loop, Stream]:
    """Return a loop over the chunks of some sections, whose body is then built as `out.code`."""
    stream = out.fusion.values[sections[0].exprs[0].outputs[0]].stream
    assert stream is not None
    taken = {*out.types, *out.fusion.values}
    name = next((n for n in "ijk" if n not in taken), None) or fresh_name(taken, "i")
    out.types[name] = BufferType(dtype=torch.int64)
    index: Index = loop(name)
    if stream.rotate is not None:
        index = calc("mod", calc("+", index, Term("coord", stream.rotate)), stream.count)
    outside, out.code = out.code, []
    made = frozenset(x for section in sections for e in section.exprs for x in e.outputs)
    return Loop(out, outside, name, index, made), stream


def emit_section(loop: Loop, section: Section) -> None:
    """Append what an iteration does of a segment."""
    if section.exprs[0].op == "set":
        _emit_set(loop, section.exprs[0])
        return
    made: dict[str, str] = {}
    body = tuple(_emit_expr(loop, section, e, made) for e in section.exprs)
    if len(body) == 1:
        loop.out.code.append(body[0])
    else:
        reads = dict.fromkeys(x for i in body for x in i.reads if x not in made.values())
        loop.out.code.append(
            Instruction(
                op="launch",
                fn=section.name,
                inputs=tuple(reads),
                outputs=tuple(made[n] for n in section.outputs),
                body=body,
                source=section.exprs[0].source,
            )
        )
    for expr in section.exprs:
        for name in expr.outputs:
            if name in section.outputs and loop.stream(name).op is not None:
                loop.accumulate(name, made[name], expr)


def _emit_expr(loop: Loop, section: Section, expr: Expr, made: dict[str, str]) -> Instruction:
    """Return an expression's instruction on chunks; `made`: value -> its name in the segment."""
    inputs: list[Operand] = []
    for x, stream in zip(expr.inputs, streams_read(loop.fusion, expr), strict=True):
        if isinstance(x, str) and loop.fusion.values[x].is_tensor:
            inputs.append(made[x] if x in made else loop.read(x, stream))
        else:
            inputs.append(x)
    for name in expr.outputs:
        is_kept = name in section.outputs and loop.stream(name).op is None
        made[name] = loop.result(name) if is_kept else loop.chunk(name)
    outputs = tuple(made[name] for name in expr.outputs)
    return replace(local(expr), inputs=tuple(inputs), outputs=outputs)


# -- sets ----------------------------------------------------------------------------------------


def _emit_set(loop: Loop, expr: Expr) -> None:
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
    """Return the position along the axis that is i steps on or back, i being the loop's index."""
    return calc("mod", calc(op, Term("coord", rotate), Term("index", loop.name)), n)


def _emit_ring(loop: Loop, expr: Expr) -> None:
    """Append one step of a ring that passes parts on.

    Each rank receives what the rank i further on holds, and sends its own part to the rank i back.
    """
    _, _, stream = _layouts(loop, expr)
    assert stream.rotate is not None
    n, axis = stream.count, stream.rotate
    type_ = loop.chunk_type(expr.output, stream)
    got = loop.out.op("alloc", loop.landing(expr.output), type_, (), expr.source)
    to, come = _position(loop, "-", axis, n), _position(loop, "+", axis, n)
    _emit_transfer(loop, expr, _whole_source(loop, expr), to, got, come)
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

    Each rank sends its part of a chunk to the rank i further on, whose chunk it is, and adds what
    comes to its own chunk.
    """
    _, _, stream = _layouts(loop, expr)
    assert stream.rotate is not None
    out, n, axis = loop.out, stream.count, stream.rotate
    current = dense(out, loop.read(expr.reads[0], stream), expr.source)
    loop.allocate(expr.output)
    kind = value_type(loop.fusion.values[expr.output])
    got = out.op("alloc", f"{expr.output}.{loop.name}.recv", kind, (), expr.source)
    to, come = _position(loop, "+", axis, n), _position(loop, "-", axis, n)
    _emit_transfer(loop, expr, current, to, got, come)
    (y,) = (expr.output,)
    first = Instruction(op="set", fn="set", inputs=(got,), outputs=(y,), source=expr.source)
    more = Instruction(op="binary", fn="add", inputs=(y, got), outputs=(y,), source=expr.source)
    test = calc("==", Term("index", loop.name), 0)
    out.code.append(Instruction(op="if", attrs=(("test", test),), body=(first,), orelse=(more,)))


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
