"""A rank that runs programs by itself, whatever other ranks do."""

from __future__ import annotations

from mdfuse.runtime.communicator import Communicator, alone
from mdfuse.runtime.opening import stand_in


def by_itself(communicator: Communicator) -> Communicator:
    """Return a communicator in which a rank runs programs without communication by itself.

    It stands for the same rank, size and device, by backend "null": other ranks may run other
    programs meanwhile, or none. `init` does not return it; its user closes it.
    """
    me = communicator
    return alone(stand_in(me.rank, me.size, me.device, me.timeout_s))
