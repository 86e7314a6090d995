"""mpirun, for ranks that are forks of a process which has torch imported already.

mpirun starts a small process in the place of each rank: this file as a program. It hands over its
environment, by which the rank is one to MPI, and from then on the two have one fate: it ends as the
rank ended, and a rank whose stand-in mpirun ended is ended likewise.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

#: How long mpirun may take to start or to end, seconds.
_PATIENCE_S = 30.0


class Mpirun:
    """An mpirun, and the stand-ins that it started.

    Args:
        command: mpirun and its options.
        ranks: how many to start.
        environment: of mpirun.
        out: takes what mpirun says.

    Attributes:
        environments: those of the stand-ins, by rank.
    """

    def __init__(
        self, command: list[str], *, ranks: int, environment: dict[str, str], out: Path
    ) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=ranks) as listener:
            listener.settimeout(_PATIENCE_S)
            port = listener.getsockname()[1]
            stand_in = [sys.executable, "-S", __file__, str(port)]
            with out.open("wb") as file:
                self._process = subprocess.Popen(
                    [*command, "-n", str(ranks), *stand_in],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self._links: dict[int, socket.socket] = {}
            self.environments: dict[int, dict[str, str]] = {}
            for _ in range(ranks):
                link, _ = listener.accept()
                said = json.loads(link.makefile().readline())
                rank = int(said["OMPI_COMM_WORLD_RANK"])
                self._links[rank], self.environments[rank] = link, said
        for link in self._links.values():
            link.setblocking(False)

    def tell(self, rank: int, status: int) -> None:
        """A rank has ended, and so does its stand-in, which may have been ended before."""
        link = self._links.pop(rank, None)
        if link is not None and not _is_closed(link):
            link.sendall(f"{status}\n".encode())

    def ended(self) -> list[int]:
        """The ranks whose stand-ins mpirun has ended, each told once."""
        ranks = [rank for rank, link in self._links.items() if _is_closed(link)]
        for rank in ranks:
            del self._links[rank]
        return ranks

    def wait(self) -> int:
        """Its exit status, once all ranks have ended.

        Raises:
            TimeoutExpired: it did not end; it was killed.
        """
        try:
            return self._process.wait(_PATIENCE_S)
        finally:
            self._process.kill()


def _is_closed(link: socket.socket) -> bool:
    """Whether the other end is gone, which never says more than it did."""
    try:
        return link.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def stand_in(port: int) -> None:
    """Hand over the environment, wait for the rank's end, and end in the same way."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        status = int(link.makefile().readline())
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    stand_in(int(sys.argv[1]))
