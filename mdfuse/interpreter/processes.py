"""Processes of a host, as they know each other from `/proc`."""

from __future__ import annotations

import os
from dataclasses import dataclass

#: Ends of processes, as the third field of /proc/PID/stat tells them: a zombie, and dead.
_ENDED = ("Z", "X")

#: Which number of that file, behind the command, tells when the process began.
_BEGAN = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of this host, as others identify it.

    Attributes:
        host: a text that only processes which see each other in /proc have in common.
        pid: its number.
        began: its start time, since numbers are reused.
    """

    host: str
    pid: int
    began: str

    def has_ended(self) -> bool:
        """Return whether the process is dead, also where its parent has not waited for it yet."""
        try:
            status = _status(self.pid)
        except OSError:  # it is hidden from this one
            return False
        return status is None or status[0] in _ENDED or status[_BEGAN] != self.began


def this_process() -> Process:
    """Return the description of this process.

    Raises:
        OSError: /proc does not show it.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    status = _status(os.getpid())
    if status is None or os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc shows the processes of another namespace")
    host = f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    return Process(host=host, pid=os.getpid(), began=status[_BEGAN])


def _status(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat behind the command; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
