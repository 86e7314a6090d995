"""The bytes that arrive at a rank in one run, communication by communication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mdfuse.communication import Communication
from mdfuse.hir.counted_rows import bytes_received
from mdfuse.hir.instructions import BLOCKS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out


def received(
    program: HostProgram, rank: int, at_worst: bool = False
) -> Iterator[tuple[Instruction, int]]:
    """Yield each post and receive that a rank runs, iterations one by one, and its bytes.

    Args:
        program: global, or the rank's projection.
        rank: the rank at which the bytes arrive.
        at_worst: count as many rows as there may be, not those expected.

    Yields:
        (instruction, bytes that arrive from other ranks by the ring model, padding included).
    """
    if program.rank is None and not _is_straight(program):
        program = written_out(project(program, rank))
    for i in program.walk():
        if i.comm is not None:
            if i.op == "post" and program.runs_on(i, rank):
                yield i, bytes_received(i, rank, at_worst)
        elif i.op == "recv":
            kind = program.types[i.reads[0]]
            is_own = i.kwargs["from"] == rank
            yield i, 0 if is_own else math.prod(kind.local_shape(rank)) * kind.dtype.itemsize


class Traffic:
    """The numbers of posts and of received bytes, one entry per rank."""

    def __init__(self, ranks: int) -> None:
        self.times = [0] * ranks
        self.bytes = [0] * ranks

    def add(self, other: Traffic) -> None:
        """Add the numbers of other posts of the same ranks."""
        self.times = [a + b for a, b in zip(self.times, other.times, strict=True)]
        self.bytes = [a + b for a, b in zip(self.bytes, other.bytes, strict=True)]


#: A kind of communication with its reduce op; the axes along which it goes, or from where to where.
Group = tuple[str, str]


def by_kind(program: HostProgram, ranks: Sequence[int]) -> dict[Group, Traffic]:
    """Return the traffic of some ranks by kind and axis, in the order of appearance."""
    groups: dict[Group, Traffic] = {}
    for at, rank in enumerate(ranks):
        for i, size in received(program, rank):
            amounts = groups.setdefault(group_of(i.comm), Traffic(len(ranks)))
            amounts.times[at] += 1
            amounts.bytes[at] += size
    return groups


def group_of(c: Communication | None) -> Group:
    """Return the kind of a communication, None for a receive, and where it goes."""
    if c is None:
        return "send and receive", "pairs"
    source, destination = c.source.mesh, c.destination.mesh
    where = ", ".join(c.axes) or "several"
    if source != destination:
        where = f"{source} to {destination}"
    return (f"{c.kind} ({c.reduce_op})" if c.reduce_op else c.kind), where


def _is_straight(program: HostProgram) -> bool:
    """Return whether every instruction runs once, and none has an index that only a rank knows."""
    return not any(i.op in (*BLOCKS, "recv") for i in program.instructions)
