"""The program that one rank runs: its projection, and the program that plans are made of.

project(program, rank)     the instructions of one rank, loops and branches included
written_out(projection)    the same one by one, in the order in which they run (`unrolled.py`)
as_run(projection)         written out, with products computed where their sums are
"""

from __future__ import annotations

from collections.abc import Callable

from mdfuse.hir.once import once
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank import accumulate_in_place, late_waits, local_streams
from mdfuse.hir.rank.execute import projected
from mdfuse.hir.rank.unrolled import RankPass, written_out
from mdfuse.hir.row_norms import with_sure_norms

#: A pass over a projection, beside the program for all ranks.
Projected = Callable[[HostProgram, HostProgram], HostProgram]

#: The passes over a projection, in order, with the reason why each stands there.
PROJECTION: tuple[tuple[str, Projected], ...] = (
    # Needs the program for all ranks: syncs that only others need guard nothing here.
    ("local_streams", local_streams.run),
    # Needs the syncs that are left: behind them a wait may stand later.
    ("late_waits", lambda mine, _: late_waits.run(mine)),
)

#: The passes over a projection that is written out, likewise.
AS_RUN: tuple[tuple[str, RankPass], ...] = (
    # Needs all buffers of sums where they stay.
    ("accumulate_in_place", accumulate_in_place.run),
)


def project(program: HostProgram, rank: int) -> HostProgram:
    """Return the projection for one rank; a projection is returned as it is."""
    if program.rank is not None:
        return program
    mine = projected(with_sure_norms(program), rank)
    for _, run in PROJECTION:
        mine = run(mine, program)
    return mine


@once
def as_run(program: HostProgram) -> HostProgram:
    """Return the program that plans are made of: a projection written out, products in place."""
    program = written_out(program)
    for _, run in AS_RUN:
        program = run(program)
    return program
