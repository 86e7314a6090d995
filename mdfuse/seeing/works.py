"""The work of a rank's instructions, asked of a table of costs once, however often it is run."""

from __future__ import annotations

from dataclasses import dataclass

from mdfuse.hir.program import HostProgram
from mdfuse.seeing.amounts import nbytes
from mdfuse.seeing.costs import Costs
from mdfuse.seeing.events import name_of


@dataclass(frozen=True, slots=True)
class WorkTime:
    """The work of an instruction, whenever it begins.

    Attributes:
        seconds: by itself.
        nbytes: that it goes through, where a cache counts.
        name: as events show it.
        source: the user's line.
    """

    seconds: float
    nbytes: int
    name: str
    source: str


def works_of(program: HostProgram, costs: Costs) -> dict[int, WorkTime]:
    """Return the work of a rank's instructions, by their numbers."""
    works: dict[int, WorkTime] = {}
    for n, i in enumerate(program.instructions):
        if seconds := costs.seconds(program, i):
            moved = nbytes(program, i) if costs.cache else 0
            works[n] = WorkTime(seconds, moved, name_of(i), str(i.source or ""))
    return works
