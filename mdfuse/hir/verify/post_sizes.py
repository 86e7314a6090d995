"""The elements that a communication reads and writes on one rank, as backends count them."""

from __future__ import annotations

import math
from functools import lru_cache

from mdfuse.communication import Communication
from mdfuse.errors import MdfuseError
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.verify.error_report import wrong
from mdfuse.layouts.boxes import Box, box_shape, box_size
from mdfuse.layouts.kinds import POINT_TO_POINT, blocks_of
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.rank_part import RankPart, touched


def part_on(program: HostProgram, i: Instruction, rank: int) -> RankPart:
    """Return a rank's part of what an instruction posts; raise ProgramError where it has none."""
    assert i.comm is not None
    try:
        return i.comm.part(rank)
    except (MdfuseError, StopIteration, AssertionError, ValueError, IndexError) as error:
        raise wrong(
            program,
            i,
            f"{i.comm} means nothing on rank {rank}",
            because=str(error) or f"from {i.comm.source} to {i.comm.destination}",
            hint="post what changes one layout into the other",
        ) from error


def uses(program: HostProgram, i: Instruction, rank: int) -> tuple[bool, bool]:
    """Return (whether a rank reads the source of a post, whether it writes its destination)."""
    assert i.comm is not None
    try:
        return _uses(i.comm, rank)
    except (MdfuseError, StopIteration, AssertionError, ValueError, IndexError):
        return _used(part_on(program, i, rank))


@lru_cache(maxsize=4096)
def _uses(comm: Communication, rank: int) -> tuple[bool, bool]:
    if comm.kind in ("Exchange", "ReduceExchange"):
        return touched(comm, rank)
    return _used(comm.part(rank))


def _used(part: RankPart) -> tuple[bool, bool]:
    has_copies = bool(part.copies)
    if part.call is None:
        return has_copies, has_copies
    if part.call.kind in POINT_TO_POINT:
        return bool(part.sends) or has_copies, bool(part.recvs) or has_copies
    source, destination = blocks_of(part.call)
    return source is not None or has_copies, destination is not None or has_copies


def check_sizes(program: HostProgram, i: Instruction, rank: int) -> None:
    """Raise ProgramError where a post's buffers are not as large as its communication says."""
    assert i.comm is not None
    types = program.types
    held = [types.get(x) if isinstance(x, str) else None for x in i.inputs]
    source, destination = (
        k if k is not None and k.layout is not None and rank in k.layout.mesh else None
        for k in held
    )
    problem = size_problem(i.comm, source, destination, rank)
    if problem is not None:
        which, actual, expected = problem
        raise wrong(
            program,
            i,
            f"rank {rank} posts {i.comm} with {actual} of %{i.inputs[which]}, expected {expected}",
            because=f"it is posted for {list(i.comm.shape)} from {i.comm.source} to "
            f"{i.comm.destination}",
            hint="post a buffer of that size; pad it where the parts of the ranks differ",
        )


@lru_cache(maxsize=4096)
def size_problem(
    comm: Communication, source: BufferType | None, destination: BufferType | None, rank: int
) -> tuple[int, str, str] | None:
    """Return what is wrong with the size of a post's buffers on a rank; None where both fit.

    Args:
        comm: the communication.
        source: the type of the buffer that is read; None where the rank has none.
        destination: the same of the buffer that is written.
        rank: whose parts are compared.

    Returns:
        (0 for the source or 1 for the destination, the size it has, the size it should have), the
        sizes as text for an error message.
    """
    if comm.kind in POINT_TO_POINT:
        expected = _shapes(comm, rank)
    else:
        expected = _counts(comm, comm.part(rank))
    for which, kind in enumerate((source, destination)):
        want = expected[which]
        if want is None:
            continue
        if kind is None:
            return which, "nothing", _text(want)
        shape = kind.local_shape(rank)
        if want not in (shape, math.prod(shape)):
            return which, _text(shape if isinstance(want, tuple) else math.prod(shape)), _text(want)
    return None


_Size = int | tuple[int, ...] | None


def _text(size: _Size) -> str:
    return f"shape {list(size)}" if isinstance(size, tuple) else f"{size} elements"


def _shapes(comm: Communication, rank: int) -> tuple[_Size, _Size]:
    """Return the local shapes of source and destination that a point-to-point kind needs."""
    reads, writes = _uses(comm, rank)
    return (
        box_shape(comm.source.box(comm.shape, rank)) if reads else None,
        box_shape(comm.destination.box(comm.shape, rank)) if writes else None,
    )


def _counts(comm: Communication, part: RankPart) -> tuple[_Size, _Size]:
    """Return how many elements a collective needs in source and destination; None for no need."""
    call = part.call
    if call is None:
        return None, None
    if call.kind == "AllToAll":
        return sum(call.send_counts), sum(call.recv_counts)
    source, destination = blocks_of(call)
    if comm.dim is None:
        before, after = (_held(x, comm, call.rank) for x in (comm.source, comm.destination))
        return source and before, destination and after
    k = block(comm, call.rank)
    return source and source * k, destination and destination * k


def _held(layout: Layout, comm: Communication, rank: int) -> int | None:
    """Return how many elements of the whole a rank holds; None where it is not in the mesh."""
    return box_size(layout.box(comm.shape, rank)) if rank in layout.mesh else None


def block(comm: Communication, rank: int) -> int:
    """Return the number of elements in one block of a communication that splits a dim.

    Args:
        comm: one whose kind splits a dim.
        rank: a member of the team.
    """
    assert comm.dim is not None
    _, rows = comm.rows(rank)
    layout = comm.whole()
    local = layout.local_shape(comm.shape, rank if rank in layout.mesh else None)
    return rows * math.prod(n for d, n in enumerate(local) if d != comm.dim)


def elements(boxes: tuple[Box, ...]) -> tuple[int, ...]:
    """Return how many elements each box holds."""
    return tuple(map(box_size, boxes))
