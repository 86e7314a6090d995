"""Meetings of all ranks in a thread, beside a program that runs: by a connection of their own.

A connection to the store waits for one thing at a time, so that a thread that waits for other ranks
must not share that of the program. Nor does it have a deadline: ranks write files for as long as
their disks take, and steps go on meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from uuid import uuid4
from weakref import ref

from mdfuse.runtime.agreement.rendezvous import Meetings
from mdfuse.runtime.communicator import Communicator
from mdfuse.runtime.deadline import NEVER, Deadline
from mdfuse.runtime.null_world import NULL
from mdfuse.runtime.stores import another_connection
from mdfuse.torch_private import PrefixStore, Store

#: The first and the longest pause between two looks for the others, seconds; and by which ranks
#: it grows, so that thousands of them do not keep the store busy.
_FIRST_S, _LONGEST_S, _RANKS = 0.002, 0.1, 1000


@dataclass(slots=True)
class Aside:
    """All ranks, as a thread of each of them meets them; see `Communicator`, whose names it has.

    Attributes:
        rank: this rank.
        deadline: of its waits, which whoever waits for the thread may set.
    """

    rank: int
    deadline: Deadline = NEVER
    meetings: Meetings | None = field(default=None, repr=False)

    def all_ok(self, error_text: str | None) -> tuple[str | None, ...]:
        """Tell all ranks None, or this rank's problem; return the texts of all ranks.

        Raises:
            BackendError: a rank did not come by the deadline; the communicator is closed.
        """
        if self.meetings is None:
            return (error_text,)
        return self.meetings.exchange(error_text)


def aside_of(comm: Communicator) -> Aside:
    """Return the ranks of a communicator as one thread meets them; all ranks call it alike."""
    aside, count = Aside(comm.rank), comm.size
    if count == 1 or comm.backend == NULL:
        return aside
    name = comm.all_ok(uuid4().hex if comm.rank == 0 else None)[0]
    store = PrefixStore(f"aside/{name}", another_connection(_base(comm.store), comm.timeout_s))
    live, longest = ref(comm), _LONGEST_S * max(1.0, count / _RANKS)

    def wait(store: Store, key: str, _: Deadline) -> None:
        pause = _FIRST_S
        while not store.check([key]):
            joined = live()
            if joined is None or joined.is_closed:
                raise RuntimeError("the communicator was closed")
            del joined
            if not aside.deadline.left():
                raise RuntimeError("the deadline has passed")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    aside.meetings = Meetings(store, comm.rank, count, comm.timeout_s, wait)
    return aside


def _base(store: Store) -> Store:
    """Return the store below all prefixes, which knows its host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
