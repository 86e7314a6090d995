"""The processes behind the ranks of a communicator, also after some of them are lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mdfuse.bootstrap import Launch

#: A process: the rank that its launcher gave it, and the epoch in which it joined, 0 for the first.
Member = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Membership:
    """The processes of a communicator, and those of the communicator before it.

    Attributes:
        members: by rank.
        before: by rank before; () where there was no communicator before.
        epoch: counts the agreements of ranks, also those that came to nothing.

    >>> now = Membership(((0, 0), (2, 0), (3, 0)), before=((0, 0), (1, 0), (2, 0), (3, 0)))
    >>> now.lost, now.new_rank(3), now.new_rank(1), now.old_rank(1)
    ((1,), 2, None, 2)
    """

    members: tuple[Member, ...]
    before: tuple[Member, ...] = ()
    epoch: int = 0

    @classmethod
    def first(cls, size: int) -> Membership:
        """Return the membership of ranks as they were started."""
        return cls(tuple((rank, 0) for rank in range(size)))

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks before whose processes are in it no more."""
        return tuple(n for n, member in enumerate(self.before) if member not in self.members)

    def new_rank(self, old: int) -> int | None:
        """Return the rank now of a rank before; None where it is lost, or was none."""
        before = self.before or self.members
        member = before[old] if 0 <= old < len(before) else None
        return self.members.index(member) if member in self.members else None

    def old_rank(self, rank: int) -> int | None:
        """Return the rank before of a rank now; None where it is new."""
        before, member = self.before or self.members, self.members[rank]
        return before.index(member) if member in before else None


def why_no_survivors(launch: Launch, environment: Mapping[str, str]) -> str | None:
    """Return why a launcher leaves nobody to go on after a rank has died; None: it does.

    >>> why_no_survivors(Launch(name="mpirun", rank=0, size=2, local_rank=0, why=""), {})
    'mpirun ends all ranks once one of them has died'
    """
    if launch.name in ("mpirun", "srun"):
        return f"{launch.name} ends all ranks once one of them has died"
    if environment.get("TORCHELASTIC_RUN_ID") and launch.local_size != 1:
        return "torchrun's agent ends its other ranks 0.1 s after one dies, and restarts all"
    return None
