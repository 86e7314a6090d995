"""What a process holds that others may find when it is dead: ports, and memory that is shared."""

from __future__ import annotations

import os
from pathlib import Path

#: What is mapped from such files is shared with other processes.
_SHARED = ("/memfd:mdfuse", "/dev/shm/")


def listening() -> set[str]:
    """The sockets of this host that listen, by the numbers of their inodes."""
    tables = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


def sockets() -> set[str]:
    """The sockets of this process."""
    links = [os.readlink(x) for x in Path("/proc/self/fd").iterdir() if x.is_symlink()]
    return {x[len("socket:[") : -1] for x in links if x.startswith("socket:[")}


def shared_memory() -> set[str]:
    """The memory of this process that others may have mapped, too: its inode and its name."""
    rows = [x.split(maxsplit=5) for x in Path("/proc/self/maps").read_text().splitlines()]
    return {f"{row[4]} {row[5]}" for row in rows if row[5:] and row[5].startswith(_SHARED)}


def held() -> dict[str, list[str]]:
    """What is to be gone with this process, or with the communicator that it belongs to."""
    return {"ports": sorted(sockets() & listening()), "memory": sorted(shared_memory())}


def left_of(dead: dict[str, list[str]]) -> list[str]:
    """What is still there of a process that held this: it listens, is mapped here, is a file."""
    files = [x for x in dead["memory"] if Path(x.split(" ", 1)[1]).exists()]
    ports = {*dead["ports"]} & listening()
    return sorted({*(f"port {x}" for x in ports), *files, *({*dead["memory"]} & shared_memory())})
