"""Blocks and their calls: which names belong to the index of a call.

    block @X(%i) { %x.i: … chunk(0,2,%i) = chunk(%x) … }          %x.i@0 = chunk(%x) …
    block @Y(%i) { %y.i = exp(%x.i) … }                           %x.i@1 = chunk(%x) …
    call X(0)                                              ->     %y.i@0 = exp(%x.i@0) …
    call X(1)                                                     %y.i@1 = exp(%x.i@1) …
    call Y(0)
    call Y(1)

What follows from a block's index, and the handles of its posts, belong to that index: `%x.i@1` is
one value, whichever blocks make and read it. Blocks are written in an order in which each could run
once; the calls say which one runs at which index, when (`verify/call_order.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mdfuse.hir.index_terms import index_names
from mdfuse.hir.instructions import POSTS
from mdfuse.hir.program import HostProgram, Instruction


def blocks_of(program: HostProgram) -> Mapping[str, Instruction]:
    """Return the blocks of a program by name."""
    return program.blocks


def per_index(program: HostProgram) -> frozenset[str]:
    """Return the names that belong to the index of a call, one buffer or handle for each."""
    blocks = blocks_of(program).values()
    if not blocks:
        return frozenset()
    outside = {program.root(n) for n in program.inputs}
    for i in program.instructions:
        if i.op != "block":
            outside.update(program.root(n) for j in i.walk() for n in j.outputs)
    names = {n for block in blocks for n in block.outputs}
    indices = frozenset(names)
    for i in (inner for block in blocks for top in block.body for inner in top.walk()):
        is_late = not names.isdisjoint(map(program.root, i.reads))
        if is_late or i.op in POSTS or not indices.isdisjoint(index_names(i, program.types)):
            names.update(n for n in map(program.root, i.outputs) if n not in outside)
    return frozenset(names) - indices


def chunks_of(program: HostProgram, block: Instruction) -> int | None:
    """Return how many chunks a block is about; None where that is no one number."""
    chunks = set[int]()
    for kind in (program.types.get(n) for i in block.body for j in i.walk() for n in j.outputs):
        stream = kind.layout.stream if kind is not None and kind.layout is not None else None
        if stream is not None and getattr(stream.index, "name", None) == block.outputs[0]:
            chunks.add(stream.count)
    return chunks.pop() if len(chunks) == 1 else None
