"""What all ranks settle before the first run of a program: that they are well, and run the same."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from mdfuse.errors import MdfuseError, ProgramError
from mdfuse.hir.program import HostProgram

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator

#: How the report of a rank begins that has a problem.
_REFUSED = "refused: "


def agree(
    name: str, problem: MdfuseError | None, communicator: Communicator, what: str | None = None
) -> None:
    """Return where all ranks are well; else raise on each of them.

    Args:
        name: of the program, for messages.
        problem: this rank's.
        communicator: of all ranks; nothing is posted.
        what: what this rank runs; all ranks run the same.

    Raises:
        MdfuseError: `problem`, where there is one.
        ProgramError: another rank has one, or runs something else.
    """
    reports = communicator.all_ok(what if problem is None else f"{_REFUSED}{problem}")
    if problem is not None:
        raise problem
    for rank, report in enumerate(reports):
        if report is not None and report.startswith(_REFUSED):
            raise ProgramError(
                f"rank {rank} refused to run @{name}",
                where=report.removeprefix(_REFUSED).splitlines(),
                because="all ranks run, or none does",
            )
    for rank, report in enumerate(reports):
        if report != reports[0]:
            raise _other_programs(rank, report, reports[0])


def fingerprint(program: HostProgram) -> str | None:
    """What tells a program from others, without the user's lines; None for one rank's own."""
    if program.rank is not None:
        return None
    text = re.sub("  # .*", "", str(program))
    inputs = [f"%{n}: {program.types[n].shape}" for n in program.inputs]
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"@{program.name} with inputs {', '.join(inputs)} ({digest[:12]})"


def _other_programs(rank: int, here: str | None, there: str | None) -> ProgramError:
    """Two ranks meet before the first runs of different programs."""
    return ProgramError(
        f"rank {rank} runs another program than rank 0",
        where=[f"rank 0: {there}", f"rank {rank}: {here}"],
        because="all ranks run one program, with the same extents",
        hint="compare print(program) on these ranks; pass the same extents= on all of them",
    )
