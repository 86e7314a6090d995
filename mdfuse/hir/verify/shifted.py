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
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from mdfuse.extents.expressions import Calc, terms
from mdfuse.extents.linear import linear
from mdfuse.hir.instructions import op_of, row_of
from mdfuse.hir.program import BufferType, HostProgram, Instruction
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

#: The same for all chunks of a program: the axis, its factor in the index, how many chunks.
_Turn = tuple[str, int, int]


def even(program: HostProgram) -> HostProgram | None:
    """Return the program with parts and chunks of one size, in which one rank stands for all.

    What is right with the flow of that rank's buffers is right with that of all ranks, and all
    types that hold for all ranks, with indices as letters, hold with the numbers of each.

    Args:
        program: for all ranks, whose blocks depend on no rank; its types were checked.

    Returns:
        None where a rank may do something else, or this cannot be told.
    """
    if len(program.meshes) != 1 or program.aliases:
        return None
    kinds = {id(k): k for k in program.types.values()}
    if not all(map(_is_plain, kinds.values())):
        return None
    if not all(_is_blind(program, i) for i in program.walk()):
        return None
    chunks = [c for k in kinds.values() if k.layout is not None and (c := chunk_of(k.layout))]
    turns = {_turn(c) for c in chunks}
    if len(turns) != 1 or None in turns or not _have_own_loops(program, chunks):
        return None
    (count,) = {c.chunks for c in chunks}
    assert isinstance(count, int)
    (mesh,) = program.meshes
    extent = 2 * count * math.prod(mesh.shape)  # each chunk of each part has rows
    made = {n: replace(k, shape=(extent,) * len(k.shape)) for n, k in kinds.items()}
    types = {name: made[id(k)] for name, k in program.types.items()}
    found = replace(program, types=types)
    vars(found)["checked"] = found  # forms do not depend on extents
    return found


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
    return place.name, factor, found.modulus


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
