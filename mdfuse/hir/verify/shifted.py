"""Let one rank stand for all where each takes the chunks in an order that is shifted by its place.

rank 0   for %i in 0..4 { chunk %i mod 4 }             0 1 2 3
rank 1   for %i in 0..4 { chunk (%i + 1) mod 4 }       1 2 3 0, and 3 may have fewer rows

With chunks called by their distance from the rank's own place both do the same: what one rank
reads before it is written, or two streams touch at once, the others do, too. How many rows a chunk
has makes no difference to that, as long as buffers are used as a whole or chunk by chunk: chunks
that overlap are the same chunk. If all is well where each chunk has as many rows, it is so where
some have fewer or none: then less is read, and what is written is complete no later.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mdfuse.extents.expressions import Calc, Index, calc, terms
from mdfuse.extents.linear import Linear, linear, made
from mdfuse.hir.instructions import TRANSFERS, op_of, row_of
from mdfuse.hir.program import BufferType, HostProgram, Instruction, Known, resolved
from mdfuse.hir.verify.apart import Memory
from mdfuse.hir.verify.layouts import chunk_of
from mdfuse.ir.dims import pointwise
from mdfuse.layouts.stream import Stream

#: Instructions beside rows of the op table that are the same whatever the number of rows.
_PLAIN = (
    *("alloc", "free", "chunk", "accumulate", "send", "recv", "wait", "barrier", "return"),
    *("group_start", "group_end", "for", "next", "if", "get_stream", "set_stream", "sync"),
)

#: Rows of the op table, besides those that are pointwise, of which extents of results are those of
#: the operands' dims.
_PRODUCTS = ("matmul", "linear")


def even(program: HostProgram, memory: Memory | None = None) -> HostProgram | None:
    """Return what one rank does that stands for all: parts and chunks of one size, no peers.

    What is right with the flow of that rank's buffers is right with that of all ranks, and all
    types that hold for all ranks, with indices as letters, hold with the numbers of each.

    Args:
        program: for all ranks, whose blocks depend on no rank; its types were checked.
        memory: what is known of it, which is so of the projection, too.

    Returns:
        A projection; None where a rank may do something else, or this cannot be told.
    """
    if len(program.meshes) != 1 or program.aliases:
        return None
    kinds = {id(k): k for k in program.types.values()}
    if not all(map(_is_plain, kinds.values())):
        return None
    if not all(_is_blind(program, i) for i in program.walk()):
        return None
    found = {c: _turn(c) for k in kinds.values() if k.layout and (c := chunk_of(k.layout))}
    turns = {c: turn for c, turn in found.items() if turn is not None}
    ways = {(turn.axis, turn.of_place, turn.index.modulus) for turn in turns.values()}
    if len(turns) < len(found) or len(ways) != 1 or not _have_own_loops(program, turns):
        return None
    ((_, _, count),) = ways
    (mesh,) = program.meshes
    extent = 2 * count * math.prod(mesh.shape)  # each chunk of each part has rows
    types = _Distances(program, memory or Memory(program), turns, extent).types()
    known = program.knows(mesh.first)
    code = tuple(_with_peers(i, known) for i in program.instructions)
    return replace(program, types=types, instructions=code, rank=mesh.first)


def _with_peers(i: Instruction, known: Known) -> Instruction:
    """Return an instruction in which sends and receives name the peers of one rank."""
    is_transfer = i.op in TRANSFERS
    if not is_transfer and not i.body and not i.orelse:
        return i
    body, orelse = (tuple(_with_peers(j, known) for j in block) for block in (i.body, i.orelse))
    attrs = resolved(i.attrs, known) if is_transfer else i.attrs
    return i.made(i.inputs, i.outputs, attrs, i.comm, body, orelse)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Which chunk it is in an iteration: a multiple of the rank's place further on for each rank.

    Attributes:
        axis: along which the place is counted.
        of_place: the multiple.
        index: the chunk on a rank at place 0: a loop's index times a number, plus a number.
    """

    axis: str
    of_place: int
    index: Linear


@dataclass(frozen=True, slots=True)
class _Distances:
    """The types of a program with chunks called by their distance from the rank's own place.

    Where all chunks of some memory are begun with one of them and go one way, they are counted from
    that one.
    """

    program: HostProgram
    memory: Memory
    turns: Mapping[Stream, _Turn]
    extent: int

    def types(self) -> dict[str, BufferType]:
        shared = self.memory.shared
        ways: dict[str, set[_Way]] = defaultdict(set)
        shifts: dict[str, tuple[_Turn | None, str]] = {}
        for name, kind in self.program.types.items():
            chunk = chunk_of(kind.layout) if kind.layout is not None else None
            if chunk is not None:
                memory, shift = shared.get(name, name), self.turns[chunk]
                shifts[name] = shift, memory
                ways[memory].add(_way(shift))
        doubtful = self.memory.ambiguous
        is_sure = ways.keys().isdisjoint(shared.get(n, n) for n in doubtful)
        known: dict[tuple[int, bool], BufferType] = {}
        types = {}
        for name, kind in self.program.types.items():
            turn, memory = shifts.get(name, (None, name))
            is_first = turn is not None and is_sure and len(ways[memory]) == 1 and _is_step(turn)
            key = id(kind), is_first
            if key not in known:
                known[key] = self.at(kind, turn, is_first)
            types[name] = known[key]
        return types

    def at(self, kind: BufferType, turn: _Turn | None, is_first: bool) -> BufferType:
        layout, shape = kind.layout, (self.extent,) * len(kind.shape)
        if layout is not None and layout.stream is not None and turn is not None:
            ((term, factor),) = turn.index.factors
            count, constant = turn.index.modulus, turn.index.constant
            index: Index = term
            if not is_first:
                index = calc("mod", calc("+", calc("*", factor, term), constant), count)
            layout = layout.with_stream(layout.stream.at(index))
        return replace(kind, shape=shape, layout=layout)


#: The chunk of iteration 0, and how many chunks further on that of the next iteration is.
_Way = tuple[int, int]


def _way(turn: _Turn) -> _Way:
    ((_, factor),) = turn.index.factors
    return turn.index.constant, factor


def _is_step(turn: _Turn) -> bool:
    """Return whether the next iteration has the next chunk, or the one before."""
    return _way(turn)[1] in (1, turn.index.modulus - 1)


def _is_plain(kind: BufferType) -> bool:
    """Return whether parts of a buffer are intervals that `torch.chunk` makes."""
    layout = kind.layout
    is_whole = kind.padding is None and not kind.flat
    return layout is None or (is_whole and not layout.reaches and not layout.blocked)


def _turn(chunk: Stream) -> _Turn | None:
    """Return how the index of a chunk is shifted from rank to rank; None where it is not so."""
    index = chunk.index
    if not isinstance(index, Calc) or index.op != "mod" or index.right != chunk.chunks:
        return None
    found = linear(index, index.right) if isinstance(index.right, int) else None
    places = [(t, n) for t, n in found.factors if t.kind == "coord"] if found is not None else []
    if found is None or len(places) != 1 or len(found.factors) != 2:
        return None
    if any(t.kind not in ("coord", "index") for t, _ in found.factors):
        return None
    ((place, factor),) = places
    return _Turn(place.name, factor, found.plus(made({place: factor}, 0, found.modulus), -1))


def _have_own_loops(program: HostProgram, chunks: Iterable[Stream]) -> bool:
    """Return whether the index of each chunk is that of one loop of the program alone.

    Then two chunks whose indices are written alike have the same number, wherever they are used.
    """
    loops = Counter(i.outputs[0] for i in program.walk() if i.op == "for")
    return all(loops[t.name] == 1 for c in chunks for t in terms(c.index) if t.kind == "index")


def _is_blind(program: HostProgram, i: Instruction) -> bool:
    """Return whether it makes no difference to an instruction how many rows chunks have."""
    op = op_of(i)
    if op is None:
        return i.op in _PLAIN
    if i.indices or i.body or op.localize is not None or op.globalize is not None:
        return False
    row = row_of(i)
    if row is None or row.is_slice:
        return False
    if op.name == "set":  # else it may be one on the author's word, who counts rows
        kinds = [program.types.get(x) for x in (*i.reads, *i.outputs)]
        return all(k is not None and k == kinds[0] for k in kinds)
    return op.rule is pointwise or op.name in _PRODUCTS
