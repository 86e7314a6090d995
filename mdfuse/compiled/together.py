"""Do something on all ranks, or report on all of them that one could not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from mdfuse.errors import MdfuseError, ProgramError
from mdfuse.runtime.communicator import Communicator

T = TypeVar("T")


def together(comm: Communicator | None, what: str, act: Callable[[], T]) -> T:
    """Do something on all ranks; where it fails on one, all raise.

    Args:
        comm: of the ranks; None: this process does it alone.
        what: in words, as "load the model".
        act: does it on this rank.

    Raises:
        MdfuseError: what this rank raised.
        ProgramError: another rank could not.
    """
    if comm is None:
        return act()
    try:
        found, problem = act(), None
    except MdfuseError as error:
        found, problem = None, error
    said = comm.all_ok(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    failed = [n for n, text in enumerate(said) if text]
    if failed:
        raise ProgramError(
            f"rank {failed[0]} could not {what}",
            where=(said[failed[0]] or "").splitlines(),
            because=f"all ranks {what.split()[0]}, or none does",
            follows=True,
        )
    return cast("T", found)
