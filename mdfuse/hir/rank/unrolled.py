"""A projection without loops, branches and aliases, in the order in which it runs."""

from __future__ import annotations

from collections.abc import Callable

from mdfuse.hir.once import once
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank import accumulate_in_place, early_waits, late_waits, unroll

RankPass = Callable[[HostProgram], HostProgram]

#: The passes that move the waits of a projection that is written out, in order, with the reason
#: why each stands there. The verifier runs them on summaries of loops, too.
WAITS: tuple[tuple[str, RankPass], ...] = (
    # Needs iterations one by one: a wait may move down into a later iteration.
    ("late_waits", late_waits.run),
    # Needs the waits where data is needed: whoever sends a buffer may have to wait sooner.
    ("early_waits", early_waits.run),
)

#: The passes that write out a projection, likewise.
WRITTEN_OUT: tuple[tuple[str, RankPass], ...] = (
    # What follows asks for the next use of a buffer, which only straight lines say.
    ("unroll", unroll.write),
    *WAITS,
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
