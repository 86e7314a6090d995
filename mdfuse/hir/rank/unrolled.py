"""A projection without loops, branches and aliases, in the order in which it runs."""

from __future__ import annotations

from collections.abc import Callable

from mdfuse.hir.once import once
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank import accumulate_in_place, late_waits, unroll

RankPass = Callable[[HostProgram], HostProgram]

#: The passes that write out a projection, in order, with the reason why each stands there.
WRITTEN_OUT: tuple[tuple[str, RankPass], ...] = (
    # What follows asks for the next use of a buffer, which only straight lines say.
    ("unroll", unroll.write),
    # Needs iterations one by one: a wait may move down into a later iteration.
    ("late_waits", late_waits.run),
    # Needs the last reads of a destination, which waits move.
    ("accumulate_in_place.receive", accumulate_in_place.receive),
)


@once
def written_out(program: HostProgram) -> HostProgram:
    """Return a projection without loops, branches and aliases.

    Raises:
        ProgramError: see `mdfuse.hir.rank.unroll.write`.
    """
    for _, run in WRITTEN_OUT:
        program = run(program)
    return program
