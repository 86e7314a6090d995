"""What need not be checked again: ranks that do what another does, numbers that a letter stood for.

rank 0   for %i in 0..8 { %y.i = exp(%x.i) }           the same on rank 3, whose parts are as
                                                       large: its projection is verified by this
%y.i: f32[2] of [16] (… chunk(0,8,%i)) = exp(%x.i)     right for %i, and each chunk has two rows:
                                                       so it is right for 0, 1, 2, …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mdfuse.errors import MdfuseError
from mdfuse.extents.expressions import Index, Term, terms
from mdfuse.hir.instructions import TRANSFERS, op_of, row_of
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.projection import localized
from mdfuse.hir.verify.layouts import chunk_of
from mdfuse.hir.verify.sizes import uses
from mdfuse.layouts.boxes import relative

#: Instructions whose index is no part of what they compute.
_COUNTED = (*TRANSFERS, "for", "if", "set_stream", "sync", "wait")


def projected(program: HostProgram, mine: HostProgram, rank: int) -> HostProgram:
    """Return the projection for a rank of the mesh, of which there is one for another rank.

    Where nothing is written that depends on the rank, it is that of the other one.
    """
    assert mine.rank is not None
    ranks = mine.rank, rank
    is_alike = len(program.meshes) == 1 and not any(map(_has_places, _indices(program)))
    if is_alike and all(_is_alike(program, i, ranks) for i in program.walk()):
        return replace(mine, rank=rank)
    return program.project(rank)


def _indices(program: HostProgram) -> set[Index]:
    """Return all index expressions of a program, those of chunks included."""
    found = {x for i in program.walk() if i.inputs or i.attrs for x in i.indices}
    layouts = {id(k.layout): k.layout for k in program.types.values() if k.layout is not None}
    ends = [k for c in program.communications for k in (c.source, c.destination)]
    chunks = (chunk_of(k) for k in (*layouts.values(), *ends))
    return found | {c.index for c in chunks if c is not None and c.index is not None}


def _has_places(index: Index) -> bool:
    return any(t.kind != "index" for t in terms(index))


def _is_alike(program: HostProgram, i: Instruction, ranks: tuple[int, int]) -> bool:
    """Return whether an instruction without indices that depend on ranks is the same on two."""
    if i.op in TRANSFERS:
        return False
    op = op_of(i)
    if op is None or op.localize is None:
        return True
    a, b = (localized(program, i, rank, program.knows(rank)) for rank in ranks)
    return a == b


def does_the_same(mine: HostProgram, other: HostProgram) -> bool:
    """Return whether two projections of a program do the same with parts of the same sizes.

    What is right with the one is then right with the other, but for the sizes of what is posted.
    """
    a, b = mine.rank, other.rank
    assert a is not None and b is not None
    if mine.instructions is not other.instructions and mine.instructions != other.instructions:
        return False
    if mine.types is not other.types and mine.types != other.types:
        return False
    kinds = {id(k): k for k in mine.types.values()}.values()
    if any(k.layout is not None and a not in k.layout.mesh for k in kinds):
        return False  # what lies elsewhere is not looked at
    if any(k.layout is not None and b not in k.layout.mesh for k in kinds):
        return False
    if any(k.local_shape(a) != k.local_shape(b) for k in kinds):
        return False
    try:
        return all(_touches_the_same(mine, i, a, b) for i in _told_by_types(mine))
    except MdfuseError:
        return False  # it means nothing on one of them


def _told_by_types(program: HostProgram) -> Iterator[Instruction]:
    """Yield the instructions of which the types, not the attributes, say what they touch."""
    for i in program.walk():
        row = row_of(i)
        if i.op == "post" or (row is not None and row.is_slice):
            yield i


def _touches_the_same(program: HostProgram, i: Instruction, a: int, b: int) -> bool:
    """Return whether an instruction has to do with the same parts of its buffers on two ranks."""
    if i.op == "post":
        return uses(program, i, a) == uses(program, i, b)
    kinds = [program.types.get(x) for x in (i.outputs[0], i.inputs[0]) if isinstance(x, str)]
    if len(kinds) < 2 or None in kinds:
        return False
    result, source = (k for k in kinds if k is not None)
    if result.layout is None or source.layout is None or len(result.shape) != len(source.shape):
        return i.op == "select"  # which of them is an attribute
    here, there = (relative(result.box(r), source.box(r)) for r in (a, b))
    return here == there


def holds_for_numbers(mine: HostProgram) -> bool:
    """Return whether types that hold with the index of a loop as a letter hold for each number.

    Args:
        mine: a projection, whose types were checked in the program for all ranks.

    Returns:
        True where there is one letter and one loop over it, and no number of a chunk beside it, so
        that none need be compared; where all parts and chunks are as large as those of the first
        rank; and where nothing is computed from an index. False where this is not sure.
    """
    rank, kinds = mine.rank, {id(k): k for k in mine.types.values()}.values()
    assert rank is not None
    layouts = [k.layout for k in kinds if k.layout is not None]
    layouts += [k for c in mine.communications for k in (c.source, c.destination)]
    letters = {c.index for c in map(chunk_of, layouts) if c is not None}
    loops = Counter(i.outputs[0] for i in mine.walk() if i.op == "for")
    if any(not isinstance(x, Term) or loops[x.name] != 1 for x in letters) or len(letters) != 1:
        return False
    if any(_asks_for_numbers(mine, i) for i in mine.walk()):
        return False
    return all(_has_one_size(k, rank) for k in kinds)


def _asks_for_numbers(program: HostProgram, i: Instruction) -> bool:
    """Return whether the types of an instruction can only be checked with numbers."""
    if i.op in ("block", "call") or (i.op not in _COUNTED and i.indices):
        return True
    if i.op != "narrow":
        return False
    kind = program.types.get(i.reads[0]) if i.reads else None
    return kind is None or kind.layout is None or kind.layout.stream is not None


def _has_one_size(kind: BufferType, rank: int) -> bool:
    """Return whether a rank's part is as large as that of the first one, and so are all chunks."""
    layout = kind.layout
    if layout is None:
        return True
    if kind.local_shape(rank) != kind.local_shape(layout.mesh.first):
        return False
    chunk = chunk_of(layout)
    if chunk is None or chunk.op is not None:
        return True
    rows = layout.with_stream(None).local_shape(kind.shape, rank)[chunk.dim]
    is_known = type(rows) is int and isinstance(chunk.chunks, int) and kind.padding is None
    return is_known and rows % chunk.count == 0
