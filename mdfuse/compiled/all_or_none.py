"""Do something on all ranks, or report on all of them that one could not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, cast

from mdfuse.errors import BackendError, ProgramError, message_of
from mdfuse.frontend.given import refused
from mdfuse.frontend.importing import save as saving
from mdfuse.runtime.agreement.rendezvous import raise_alike
from mdfuse.runtime.communicator import Communicator

T = TypeVar("T")


class Together(Protocol):
    """All ranks, as a communicator meets them, or a thread beside it."""

    rank: int

    def all_ok(self, error_text: str | None) -> tuple[str | None, ...]:
        """Tell all ranks None, or this rank's problem; return the texts of all ranks."""


def check_communicator(call: str, comm: object) -> None:
    """Raise ProgramError unless the argument is a communicator or None."""
    if not isinstance(comm, Communicator | None):
        raise refused(
            call,
            "comm",
            comm,
            because="it is the communicator of the ranks that do so together",
            hint="comm=mf.init()",
            kind=ProgramError,
        )


def together(comm: Together | None, what: str, act: Callable[[], T]) -> T:
    """Do something on all ranks; where it fails on one, all raise.

    Args:
        comm: of the ranks; None: this process does it alone.
        what: the action in words, as "load the model".
        act: does it on this rank.

    Raises:
        Exception: the error of this rank, of any type: the others do not wait for it.
        ProgramError: another rank could not.
    """
    if comm is None:
        return act()
    returned, problem = None, None
    try:
        returned = act()
    except Exception as error:
        problem = error

    def elsewhere(rank: int, text: str) -> ProgramError:
        because = f"all ranks {what.split()[0]}, or none does"
        return ProgramError(
            f"rank {rank} could not {what}", where=text.splitlines(), because=because
        )

    raise_alike(problem, comm.all_ok(None if problem is None else message_of(problem)), elsewhere)
    return cast("T", returned)


def save_together(
    comm: Together | None,
    what: str,
    folder: Path,
    write: Callable[[], None],
    finish: Callable[[], None],
) -> None:
    """Write a checkpoint: each rank writes its boxes, then the first one the index.

    Args:
        comm: as for `together`.
        what: likewise.
        folder: of the checkpoint.
        write: writes the boxes of this rank.
        finish: writes the index; from then on the folder is a checkpoint.

    Raises:
        Exception: as `together` does; the folder is no checkpoint then, and has no files of it.
    """
    do = partial(together, comm, what)
    rank = 0 if comm is None else comm.rank
    do(partial(saving.check_folder, folder))
    try:
        do(write)
        do(first_alone(rank, finish))
    except BackendError:
        raise  # nobody knows how far the others are: they may have all that they need
    except Exception:
        saving.remove_parts(folder, rank)
        raise


def first_alone(rank: int, act: Callable[[], None]) -> Callable[[], None]:
    """Return what a rank does where the first one acts and the others wait for it."""
    return act if rank == 0 else _nothing


def _nothing() -> None:
    """Do nothing."""
