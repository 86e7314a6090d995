"""Rows whose number a run counts: how many each rank holds, sends and receives.

    %c: i64[4,8] (ep=R) = fetch(%n, most=64)
    %r: f32[<=256:%c,16] of [4,8,64,16] (ep=S1) = alloc(%c)
    %h = post alltoall(%s) -> %r f32[4,8,64,16] (ep=S0) => (ep=S1) axis=ep dim=0 to_dim=1 counts=%c

A value `f32[parts,experts,bound,…]` has `%c[p,e]` rows at each place of its first two dims, and
only these are stored: part by part, in a part expert by expert. A rank holds the rows of its box of
parts and experts; it sends another rank those that are in the boxes of both. So what ranks send and
receive are sums over boxes of one table, and fit together by construction. A rank knows the counts
of all parts, or of those that outer axes leave it, along which no row moves: `(dp=S0, ep=R)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from mdfuse.communication import Communication
from mdfuse.hir.instructions import counts_of
from mdfuse.ir.packed_rows import RowBlocks
from mdfuse.layouts.boxes import Interval, box_size, intersect, nth_chunk

if TYPE_CHECKING:
    from mdfuse.hir.program import BufferType, HostProgram, Instruction
    from mdfuse.layouts.layout import Layout

#: The parts and the experts whose rows are held, or moved.
Cell = tuple[Interval, Interval]
_NOTHING: Cell = ((0, 0), (0, 0))


def cell_of(kind: BufferType, rank: int) -> Cell:
    """Return the parts and the experts whose rows a rank holds."""
    parts, experts, *_ = kind.box(rank)
    return parts, experts


def cells_of(plain: BufferType, kind: BufferType, rank: int) -> tuple[Cell, ...]:
    """Return the cells whose rows lie one behind the other in a rank's plain buffer.

    Args:
        plain: [parts,most,…], or [parts,groups,most,…] with groups of experts, cut as by
            `torch.chunk`.
        kind: of the rows that are counted.
        rank: whose.
    """
    (start, stop), experts = cell_of(kind, rank)
    groups = [experts]
    if is_grouped(plain, kind):
        each = (nth_chunk((0, kind.shape[1]), plain.shape[1], g) for g in range(plain.shape[1]))
        groups = [*each][slice(*plain.box(rank)[1])]
    return tuple(((p, p + 1), group) for p in range(start, stop) for group in groups)


def blocks_of(plain: BufferType, kind: BufferType, rank: int, first: int = 0) -> RowBlocks:
    """Return how the cells of a rank's plain buffer lie among counts of parts from `first` on.

    See `cells_of`.
    """
    (start, stop), experts = cell_of(kind, rank)
    parts = (start - first, stop - first) if start < stop else (0, 0)
    if not is_grouped(plain, kind):
        return RowBlocks(parts=parts, experts=experts, groups=1, width=box_size((experts,)))
    groups = box_size(plain.box(rank)[1:2])
    return RowBlocks(parts=parts, experts=experts, groups=groups, width=group_size(plain, kind))


def is_grouped(plain: BufferType, kind: BufferType) -> bool:
    """Return whether a plain buffer has its rows by groups of experts."""
    return len(plain.shape) == len(kind.shape)


def group_size(plain: BufferType, kind: BufferType) -> int:
    """Return how many experts the largest group has."""
    return -(-kind.shape[1] // max(plain.shape[1], 1))


def is_held(axes: Sequence[str], layout: Layout) -> bool:
    """Return whether ranks hold rows of no other parts than these axes, outermost first, leave."""
    real = [a for a in layout.split_axes(0) if layout.mesh.axis_size(a) > 1]
    is_plain = 0 not in layout.in_runs and layout.reach(0) is None
    return not axes or (is_plain and real[: len(axes)] == [*axes])


@lru_cache(maxsize=1024)
def moves(comm: Communication, rank: int) -> tuple[tuple[Cell, ...], tuple[Cell, ...]]:
    """Return the cells that a rank sends to each member of its team, and receives from each."""
    team = comm.team(rank)
    before, after = (
        {r: layout.box(comm.shape, r)[:2] for r in team}
        for layout in (comm.source, comm.destination)
    )
    sent = (intersect(before[rank], after[r]) for r in team)
    received = (intersect(before[r], after[rank]) for r in team)
    return tuple(map(_cell, sent)), tuple(map(_cell, received))


def _cell(box: Sequence[Interval] | None) -> Cell:
    if box is None:
        return _NOTHING
    parts, experts = box
    return parts, experts


def row_size(comm: Communication, rank: int) -> int:
    """Return how many elements a rank has of a row, whose columns other axes may split."""
    return math.prod(comm.source.local_shape(comm.shape, rank)[3:])


# -- how many bytes, before anything is counted ----------------------------------------------------

#: (the cells that arrive from others, the communication) -> how many rows they are taken for.
_Estimate = Callable[[Sequence[Cell], Communication], float]


def _worst(cells: Sequence[Cell], comm: Communication) -> float:
    """Return the rows where all that parts may have are in these cells."""
    parts = {
        p for (start, stop), experts in cells if box_size((experts,)) for p in range(start, stop)
    }
    return len(parts) * _bound(comm)


def _expected(cells: Sequence[Cell], comm: Communication) -> float:
    """Return the rows where parts are full, and experts have equally many rows."""
    return sum(map(box_size, cells)) * _bound(comm) / max(comm.shape[1], 1)


def _bound(comm: Communication) -> int:
    """Return how many rows a part may have, or the chunk of it that is moved."""
    return comm.source.local_shape(comm.shape)[2]


def _received(i: Instruction, rank: int, rows: _Estimate) -> int:
    comm = i.comm
    assert comm is not None and comm.dtype is not None
    team = comm.team(rank)
    cells = [cell for r, cell in zip(team, moves(comm, rank)[1], strict=True) if r != rank]
    return math.ceil(rows(cells, comm)) * row_size(comm, rank) * comm.dtype.itemsize


def bytes_received(i: Instruction, rank: int, at_worst: bool = False) -> int:
    """Return the bytes that reach a rank by a post in one run.

    Rows that a run counts are as many as are expected, where parts are full and experts equally
    busy; or as many as there may be, `at_worst`.
    """
    assert i.comm is not None
    if counts_of(i) is None:
        return i.comm.bytes_received(rank)
    return _received(i, rank, _worst if at_worst else _expected)


def with_expected_rows(program: HostProgram) -> HostProgram:
    """Return a rank's program whose types have as many rows as are expected, for estimates."""
    rank, types = program.rank, program.types
    if rank is None or not is_counted(types.values()):
        return program
    expected = {n: _with_rows(k, rank) if k.counts is not None else k for n, k in types.items()}
    return replace(program, types=expected)


def _with_rows(kind: BufferType, rank: int) -> BufferType:
    if kind.layout is None or rank not in kind.layout.mesh:
        return kind
    parts, experts, most, *inner = kind.shape
    _, held = cell_of(kind, rank)
    rows = -(-most * box_size((held,)) // max(experts, 1))
    return replace(kind, shape=(parts, experts, rows, *inner))


def is_counted(kinds: Iterable[BufferType | None]) -> bool:
    """Return whether rows of one of some types are counted."""
    return any(k is not None and k.counts is not None for k in kinds)
