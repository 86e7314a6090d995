"""The bytes that arrive at a rank in one run, communication by communication."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mdfuse.hir.instructions import BLOCKS
from mdfuse.hir.program import HostProgram, Instruction


def received(program: HostProgram, rank: int) -> Iterator[tuple[Instruction, int]]:
    """Yield each post and receive that a rank runs, iterations one by one, and its bytes.

    Args:
        program: global, or the rank's projection.
        rank: the rank at which the bytes arrive.

    Yields:
        (instruction, bytes that arrive from other ranks by the ring model, padding included).
    """
    if program.rank is None and not _is_straight(program):
        program = program.project(rank).written_out
    for i in program.walk():
        if i.comm is not None:
            if i.op == "post" and program.runs_on(i, rank):
                yield i, i.comm.bytes_received(rank)
        elif i.op == "recv":
            kind = program.types[i.reads[0]]
            is_own = i.kwargs["from"] == rank
            yield i, 0 if is_own else math.prod(kind.local_shape(rank)) * kind.dtype.itemsize


def _is_straight(program: HostProgram) -> bool:
    """Return whether every instruction runs once, and none has an index that only a rank knows."""
    return not any(i.op in (*BLOCKS, "recv") for i in program.instructions)
