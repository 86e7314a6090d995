"""Emit host loops over stream chunks: group segments into loops, and emit one iteration of each.

    %y: f32[8,4] (tp=R, stream(0,4)) = add(%x, 1.0)
->
    %y: f32[8,4] (tp=R) = alloc
    for %i in 0..4 {
      %x.i: f32[2,4] of [8,4] (tp=R, chunk(0,4,%i)) = chunk(%x)
      %y.i: f32[2,4] of [8,4] (tp=R, chunk(0,4,%i)) = chunk(%y)
      %y.i = add(%x.i, 1.0)
    }

A value that only its own loop reads has no whole buffer: an iteration binds its chunk only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import networkx as nx
import torch
from networkx.utils import UnionFind

from mdfuse.errors import LoweringError
from mdfuse.extents.expressions import Index, Term, calc, loop
from mdfuse.hir.emit.loop import Loop
from mdfuse.hir.emit.loop_sets import emit_set
from mdfuse.hir.emit.ragged_values import emit_counted, emit_fetches, is_counted_expr
from mdfuse.hir.emit.sets import Emitter, local
from mdfuse.hir.program import BufferType, Instruction
from mdfuse.ir.graph import Expr, Fusion, Operand, fresh_name
from mdfuse.layouts.stream import Stream
from mdfuse.layouts.streamed_sets import RINGS
from mdfuse.passes.segmentation import HostLoops, Section, set_form, streams_read


def loops(fusion: Fusion, segments: Iterable[Section]) -> list[list[Section]]:
    """Group segments: neighbours of one host loop together, all others by themselves.

    Args:
        fusion: after all passes.
        segments: its sections, in order.
    """
    groups: list[list[Section]] = []
    host_loops = HostLoops(fusion)
    streams = [v.stream for v in fusion.values.values() if v.stream is not None]
    if any(stream.op is not None for stream in streams):
        return _gathered(list(segments), host_loops)
    for section in segments:
        last = [e for p in groups[-1] for e in p.exprs] if groups else []
        if last and section.is_streamed and host_loops.may_share(last, section.exprs):
            groups[-1].append(section)
        else:
            groups.append([section])
    return groups


def _gathered(sections: list[Section], host_loops: HostLoops) -> list[list[Section]]:
    """Group sections into as few loops as possible, in a new order.

    A section may join a loop unless it must wait, through a section outside, for a sum of this
    loop. Sections are placed from the last to the first, each into the latest loop that it may
    join: so a value is computed in the loop that uses it, and loops that must come first, as one
    that counts, stay small.
    """
    owner = {name: n for n, s in enumerate(sections) for e in s.exprs for name in e.outputs}
    edges = {(owner[x], n) for n, s in enumerate(sections) for x in s.inputs if x in owner}
    home = _homes(sections, sorted(edges), host_loops, _rings(sections, host_loops.fusion))
    members: dict[int, list[int]] = defaultdict(list)
    for n in range(len(sections)):
        members[home.get(n, n)].append(n)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(members)
    ends = ((home.get(n, n), home.get(k, k)) for n, k in edges)
    graph.add_edges_from((a, b) for a, b in ends if a != b)
    order = nx.lexicographical_topological_sort(graph)
    return [[sections[k] for k in members[n]] for n in order]


def _rings(sections: Sequence[Section], fusion: Fusion) -> list[object]:
    """Return for each section a key of its ring, equal where chunks go from one to the other.

    A rank begins a ring at its own chunk, and chunks in zigzag order lie apart in a whole value: a
    value of another loop would be read and written beside its place. Not in a ring: None.
    """
    same: UnionFind[str] = UnionFind()
    turning = {n for n, v in fusion.values.items() if v.stream is not None and v.stream.rotate}
    for expr in (e for s in sections for e in s.exprs if e.outputs[0] in turning):
        pairs = zip(expr.inputs, streams_read(fusion, expr), strict=True)
        read = [x for x, stream in pairs if isinstance(x, str) and stream is not None]
        same.union(*expr.outputs, *(x for x in read if x in turning))
    firsts = [s.exprs[0].outputs[0] for s in sections]
    return [same[x] if x in turning else None for x in firsts]


def _homes(
    sections: Sequence[Section],
    edges: Iterable[tuple[int, int]],
    host_loops: HostLoops,
    rings: Sequence[object],
) -> dict[int, int]:
    """Return streamed section -> its loop; the last section of a loop names it."""
    readers: dict[int, list[int]] = {n: [] for n in range(len(sections))}
    for n, k in edges:
        readers[n].append(k)
    home: dict[int, int] = {}
    #: section, or loop -> the loops that wait for it
    waiters: dict[int, set[int]] = {}
    for n in reversed(range(len(sections))):
        waiting = {k: {home[k]} if k in home else waiters[k] for k in readers[n]}
        for last in dict.fromkeys(home.values()) if sections[n].is_streamed else ():
            outside = set().union(*(loops for k, loops in waiting.items() if home.get(k) != last))
            near = [sections[k] for k in (last, *readers[n]) if home.get(k) == last]
            exprs = [e for s in near for e in s.exprs]
            is_free = rings[n] == rings[last] and last not in _behind(outside, waiters)
            if is_free and host_loops.may_share(sections[n].exprs, exprs):
                home[n] = last
                break
        if sections[n].is_streamed:
            home.setdefault(n, n)
        at = home.get(n, n)
        waiters.setdefault(at, set()).update(*waiting.values())
        waiters[at].discard(at)
    return home


def _behind(loops: set[int], waiters: dict[int, set[int]]) -> set[int]:
    """Return loops, and all loops that wait for them."""
    waiting, new = set[int](), set(loops)
    while new:
        waiting |= new
        new = set().union(*(waiters[m] for m in new)) - waiting
    return waiting


def emit_loop(out: Emitter, sections: Sequence[Section]) -> None:
    """Append a loop that computes the values of some streamed segments.

    Args:
        out: the program under construction, with the code before the loop.
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
    """Return a loop over the chunks of some sections; `out.code` is its body from now on."""
    fusion, exprs = out.fusion, [e for section in sections for e in section.exprs]
    stream = fusion.values[exprs[0].outputs[0]].stream
    assert stream is not None
    taken = {*out.types, *fusion.values}
    name = next((n for n in "ijk" if n not in taken), None) or fresh_name(taken, "i")
    out.types[name] = BufferType(dtype=torch.int64)
    computed = frozenset(x for e in exprs for x in e.outputs)
    outside, out.code = out.code, []
    building = Loop(out, outside, name, loop(name), computed)
    if stream.rotate is not None:
        rings = {form: e for e in exprs if (form := set_form(fusion, e)) in RINGS}
        for e in rings.values():
            building.pieces = stream.count // fusion.layout(e.output).mesh.axis_size(stream.rotate)
        building.is_own_last = [*rings] == ["ring_reduce"]
        building.index = _rotated(building, stream)
    return building, stream


def _rotated(loop: Loop, stream: Stream) -> Index:
    """Return the chunk of a rank in an iteration: its own shard comes first, or last."""
    begin: Index = Term("coord", str(stream.rotate))
    if loop.pieces > 1:
        begin = calc("*", begin, loop.pieces)
    index = calc("+", Term("index", loop.name), begin)
    if loop.is_own_last:
        index = calc("+", index, loop.pieces)
    return calc("mod", index, stream.count)


def emit_section(loop: Loop, section: Section) -> None:
    """Append the instructions of a segment in one iteration."""
    if is_counted_expr(loop.out, section.exprs[0]):
        _emit_counted(loop, section.exprs[0])
        return
    if section.exprs[0].op == "set":
        emit_set(loop, section.exprs[0])
        return
    names: dict[str, str] = {}
    body = tuple(_emit_expr(loop, section, e, names) for e in section.exprs)
    if len(body) == 1:
        loop.out.code.append(body[0])
    else:
        reads = dict.fromkeys(x for i in body for x in i.reads if x not in names.values())
        loop.out.code.append(
            Instruction(
                op="launch",
                fn=section.name,
                inputs=tuple(reads),
                outputs=tuple(names[n] for n in section.outputs),
                body=body,
                source=section.exprs[0].source,
            )
        )
    for expr in section.exprs:
        for name in expr.outputs:
            is_sum = name in section.outputs and loop.stream(name).op is not None
            if is_sum and loop.is_whole(name):  # counts may be read as terms alone
                loop.accumulate(name, names[name], expr)
    emit_fetches(loop.out, {name: names[name] for name in section.outputs if name in names})


def _emit_counted(loop: Loop, expr: Expr) -> None:
    """Append what moves the rows that one iteration counts."""
    value, stream = loop.fusion.values[expr.output], loop.stream(expr.output)
    if value.is_counted and loop.is_whole(value.name):
        raise LoweringError(
            f"%{value.name} = {expr.op} in microbatches",
            where=loop.fusion.where(value.name),
            because="its rows are counted for each microbatch, and another loop reads them",
            hint="compute the loss in one go over the batch, or microbatches=1",
        )
    inputs = [
        loop.read(x, how) if isinstance(x, str) else x
        for x, how in zip(expr.inputs, streams_read(loop.fusion, expr), strict=True)
    ]
    kind = loop.chunk_type(value.name, stream)
    is_here = not loop.is_whole(value.name)
    name = loop.landing(value.name) if is_here else loop.result(value.name)
    emit_counted(loop.out, replace(expr, inputs=tuple(inputs), outputs=(name,)), kind)
    if is_here:
        loop.chunks[value.name, stream.dim] = name


def _emit_expr(loop: Loop, section: Section, expr: Expr, names: dict[str, str]) -> Instruction:
    """Return an expression's instruction on chunks; `names`: value -> its name in the segment."""
    inputs: list[Operand] = []
    for x, stream in zip(expr.inputs, streams_read(loop.fusion, expr), strict=True):
        if isinstance(x, str) and loop.fusion.values[x].is_tensor:
            inputs.append(names[x] if x in names else loop.read(x, stream))
        else:
            inputs.append(x)
    for name in expr.outputs:
        is_result = name in section.outputs and loop.stream(name).op is None
        names[name] = loop.result(name) if is_result else loop.chunk(name)
    outputs = tuple(names[name] for name in expr.outputs)
    return replace(local(expr), inputs=tuple(inputs), outputs=outputs)
