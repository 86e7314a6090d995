"""See which ranks of this host have come to a meeting of all ranks, without a store.

A rank that comes to such a place leaves a mark: the name of a socket, which the kernel keeps as
long as the process lives, and which others read in `/proc/net/unix`. The name has the process's
number, which tells whether the process is stopped. No rank is asked, and none listens.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mdfuse.bootstrap import Launch

#: Variables that distinguish the ranks of one launch from those of another, where they are set.
_IDENTITY = (
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
)

#: The state of a stopped process in /proc: by a signal, or by a debugger.
_STOPPED = ("T", "t")


class Neighbours:
    """The marks that this rank leaves for other ranks of its host, and those that it sees."""

    def __init__(self, launch: Launch, environment: Mapping[str, str]) -> None:
        identity = [f"{os.getuid()}", launch.name, f"{launch.size}"]
        identity += [environment.get(name, "") for name in _IDENTITY]
        self._launch = launch
        self._prefix = "mdfuse/" + hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
        self._marks: list[socket.socket] = []

    def come_to(self, place: str) -> None:
        """Leave a mark that this rank has come to a place where all ranks meet."""
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):  # it only helps others to say who is missing
            mark.bind(f"\0{self._prefix}/{place}/{self._launch.rank}/{os.getpid()}")
            self._marks.append(mark)

    def missing(self, place: str) -> dict[int, str]:
        """Return the ranks that keep the others waiting at a place, with a description of each.

        Missing ranks are only known where all ranks are on one host. If not even this rank's own
        mark is seen, nothing is known.
        """
        there = self._there(place)
        if self._launch.rank not in there:
            return {}
        reasons = self.stopped(place)
        if self._launch.is_one_host:
            away = set(range(self._launch.size)) - there.keys()
            reasons |= dict.fromkeys(away, f"did not come to {place}: busy elsewhere, or gone")
        return dict(sorted(reasons.items()))

    def stopped(self, place: str) -> dict[int, str]:
        """Return the ranks whose processes came to a place and are stopped now, with a text."""
        seen = self._there(place).items()
        return {r: "stopped, by a signal or a debugger" for r, pid in seen if _is_stopped(pid)}

    def _there(self, place: str) -> dict[int, int]:
        """Return the process numbers of the ranks that have come to a place, by rank."""
        with suppress(OSError):
            names = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
            marks = re.findall(rf"@{self._prefix}/{re.escape(place)}/(\d+)/(\d+)$", names, re.M)
            return {int(rank): int(pid) for rank, pid in marks}
        return {}


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return state.rpartition(")")[2].split()[0] in _STOPPED
    return False
