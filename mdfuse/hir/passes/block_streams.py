"""Put the stages of a pipeline on streams of their own, where their meshes share ranks.

    block @F0(%i) on m0 { %h.i = … }            block @F0(%i) on m0 { set_stream 0   %h.i = … }
    block @T01(%i) { %g.i = narrow(%h.i) }  ->  block @T01(%i) { set_stream 1   sync 0   %g.i = … }
    block @F1(%i) on m1 { … }                   block @F1(%i) on m1 { set_stream 1   … }

A rank of two meshes then works on both stages at once, as two ranks would. Each mesh has a stream;
a hand-over is on that of the mesh that it goes to, and waits for what it hands over. The streams
wait for the caller's before the first call, and it for them behind the last one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, dataflow
from mdfuse.hir.block_calls import blocks_of
from mdfuse.hir.instructions import received
from mdfuse.hir.passes.assign_streams import set_stream, sync_with
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import fresh_name
from mdfuse.mesh import DeviceMesh

name = "block_streams"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with its blocks on streams, if any rank has blocks of several meshes."""
    blocks = blocks_of(program)
    meshes = list(dict.fromkeys(_mesh(program, block) for block in blocks.values()))
    pairs = combinations(meshes, 2)
    if options.streams == 1 or not any({*a.ranks} & {*b.ranks} for a, b in pairs):
        return program
    streams = {mesh: n % options.streams for n, mesh in enumerate(meshes)}
    flow, homes = dataflow(program), dict[str, int]()
    code = [
        _on_stream(flow, i, streams[_mesh(program, i)], homes) if i.op == "block" else i
        for i in program.instructions
    ]
    first, *_, last = (n for n, i in enumerate(code) if i.op == "call")
    calls = [i for i in code[first : last + 1] if i.op == "call"]
    ahead = [i for i in code[first : last + 1] if i.op != "call"]  # waits for what all may read
    caller = fresh_name(program.types, "caller")
    used = sorted({*streams.values()})
    begin = Instruction(op="get_stream", outputs=(caller,))
    end = Instruction(op="set_stream", inputs=(caller,))
    waits = [j for s in used for j in (set_stream(s), Instruction(op="sync", inputs=(caller,)))]
    ends = [end, *(sync_with(s) for s in used)]
    code = [*code[:first], *ahead, begin, *waits, *calls, *ends, *code[last + 1 :]]
    return replace(program, instructions=tuple(code))


def _mesh(program: HostProgram, block: Instruction) -> DeviceMesh:
    """Return the mesh on whose stream a block is: where it computes, or hands over to."""
    inside = [j for i in block.body for j in i.walk()]
    for i in inside:
        if i.comm is not None:
            return i.comm.destination.mesh
    kinds = (program.types[n] for i in inside for n in i.outputs if n in program.types)
    return next(k.layout.mesh for k in kinds if k.layout is not None)


def _on_stream(
    flow: Dataflow, block: Instruction, stream: int, homes: dict[str, int]
) -> Instruction:
    """Return a block on a stream, which waits for the others that made what it uses.

    Args:
        flow: of the program.
        block: the block.
        stream: its stream.
        homes: name -> the stream of the block that made it, or wrote it last; the block's own are
            added.
    """
    inside = [j for i in block.body for j in i.walk()]
    names = {n for i in inside for n in (*i.reads, *i.outputs)}
    away = {homes.get(n, stream) for n in names} - {stream}
    arrived = {n for i in inside for n in received(i)}
    homes.update(dict.fromkeys(arrived | flow.effects(block).writes, stream))
    head = (set_stream(stream), *map(sync_with, sorted(away)))
    return replace(block, body=(*head, *block.body))
