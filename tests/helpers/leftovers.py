"""What a process holds that others may find when it is dead: ports, and memory that is shared."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

from mdfuse.backends.symmetric.heap import the_heap

#: What is mapped from such files is shared with other processes.
_SHARED = ("/memfd:mdfuse", "/dev/shm/")


def listening() -> set[str]:
    """The sockets of this host that listen, by the numbers of their inodes."""
    tables = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


def sockets() -> set[str]:
    """The sockets of this process, likewise."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found.add(os.readlink(path))
    return {x[len("socket:[") : -1] for x in found if x.startswith("socket:[")}


def mapped() -> dict[str, str]:
    """The memory of this process that others may have mapped, too: its inode -> its name."""
    rows = [x.split(maxsplit=5) for x in Path("/proc/self/maps").read_text().splitlines()]
    return {x[4]: x[5] for x in rows if x[5:] and x[5].startswith(_SHARED)}


def held() -> dict[str, list[str]]:
    """What is to be gone with this process: ports, its heap, files of memory that it shares."""
    heap = the_heap()
    return {
        "ports": sorted(sockets() & listening()),
        "heap": [] if heap is None else [str(os.fstat(heap.memory.file).st_ino)],
        "files": sorted(x for x in mapped().values() if x.startswith("/dev/shm/")),
    }


def left_of(dead: dict[str, list[str]]) -> list[str]:
    """What is still there of a process that held this: it listens, is mapped here, is a file."""
    for _ in range(2):  # what was garbage may have held more
        gc.collect()
    heaps = [f"heap {x}" for x in dead["heap"] if x in mapped()]
    files = [x for x in dead["files"] if Path(x).exists()]
    return [*heaps, *files, *(f"port {x}" for x in {*dead["ports"]} & listening())]
