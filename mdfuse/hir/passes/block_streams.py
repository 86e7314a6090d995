"""Put the stages of a pipeline on streams of their own, where their meshes share ranks.

    block @F0(%i) on m0 { %h.i = … }            block @F0(%i) on m0 { set_stream 0   %h.i = … }
    block @T01(%i) { %g.i = narrow(%h.i) }  ->  block @T01(%i) { set_stream 1   sync 0   %g.i = … }
    block @F1(%i) on m1 { … }                   block @F1(%i) on m1 { set_stream 1   … }

A rank of two meshes then works on both stages at once, as two ranks would. Each mesh has a stream;
a hand-over is on that of the mesh that it goes to, and waits for what it hands over. The streams
wait for the caller's before the first call, and it for them behind the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import shared_operand, storage
from mdfuse.hir.calls import blocks_of
from mdfuse.hir.instructions import POSTS
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
    assigned = _Assigned(program, storage(program))
    code = [
        assigned.block(i, streams[_mesh(program, i)]) if i.op == "block" else i
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


@dataclass
class _Assigned:
    program: HostProgram
    shared: dict[str, str]
    #: name -> the stream of the block that made it, or wrote it last
    homes: dict[str, int] = field(default_factory=dict)

    def block(self, block: Instruction, stream: int) -> Instruction:
        """Return a block on a stream, which waits for the others that made what it uses."""
        inside = [j for i in block.body for j in i.walk()]
        names = [n for i in inside for n in (*i.reads, *i.outputs)]
        away = {self.homes.get(n, stream) for n in names} - {stream}
        for n in self.written(inside):
            self.homes[n] = stream
        head = (set_stream(stream), *map(sync_with, sorted(away)))
        return replace(block, body=(*head, *block.body))

    def written(self, code: list[Instruction]) -> Iterator[str]:
        """Yield the names that are made, and those whose memory is written."""
        made = set[str]()
        for i in code:
            is_view = shared_operand(i) is not None and made.isdisjoint(i.outputs)
            into = i.reads[-1:] if i.op in POSTS else ()
            for n in (*i.outputs, *into):
                yield n
                if not is_view:
                    yield self.shared.get(self.program.root(n), n)
            made.update(i.outputs)
