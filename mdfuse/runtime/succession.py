"""The communicator that programs run on after another one is closed."""

from __future__ import annotations

from mdfuse.config import Options
from mdfuse.runtime.agreement.abort_protocol import not_open
from mdfuse.runtime.communicator import Communicator, init, live
from mdfuse.runtime.membership import Member


def members() -> tuple[Member, ...]:
    """Return the processes behind the ranks of this process's communicator; () for none."""
    communicator = live()
    return () if communicator is None else communicator.membership.members


def successor(communicator: Communicator | None, options: Options | None) -> Communicator:
    """Return the communicator of programs whose last one is closed.

    Raises:
        BackendError: ranks were lost: they are numbered anew.
    """
    if communicator is not None and communicator.is_left:
        raise not_open(communicator.rank, "run a program of before the rebuild", is_fork=False)
    return init(options)
