"""The work of a rank's instructions, asked of a table of costs once, however often it is run."""

from __future__ import annotations

from dataclasses import dataclass

from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.seeing.amounts import nbytes
from mdfuse.seeing.costs import Costs
from mdfuse.seeing.events import name_of


@dataclass(frozen=True, slots=True)
class WorkTime:
    """The work of an instruction, whenever it begins.

    Attributes:
        seconds: by itself.
        nbytes: that it goes through, where a cache counts.
        kind: its kind and sizes; behind work of the same it takes no switch.
        name: as events show it.
        source: the user's line.
    """

    seconds: float
    nbytes: int
    kind: object
    name: str
    source: str


def works_of(program: HostProgram, costs: Costs) -> dict[int, WorkTime]:
    """Return the work of a rank's instructions, by their numbers."""
    works: dict[int, WorkTime] = {}
    for n, i in enumerate(program.instructions):
        if seconds := costs.seconds(program, i):
            moved = nbytes(program, i) if costs.cache else 0
            works[n] = WorkTime(seconds, moved, _kind(program, i), name_of(i), str(i.source or ""))
    return works


def _kind(program: HostProgram, i: Instruction) -> object:
    kinds = (program.types.get(x) for x in (*i.reads, *i.outputs))
    return i.fn or i.op, tuple(k.shape for k in kinds if k is not None)
