"""A rank's process as its peers and its host see it: alive or dead, and what it is doing."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Where a rank's process is, and the file into which it dumps its stacks when asked."""

    rank: int
    host: str
    number: int
    stacks: str

    @staticmethod
    def from_text(text: str) -> Process:
        return Process(**json.loads(text))

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def is_visible(self) -> bool:
        """Whether it can be signalled from here: it is alive, on this host, and not in a box."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.number, 0)
        except OSError:
            return False
        return True

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.number, signal.SIGKILL)

    def dump_stacks(self) -> str:
        """Ask for the stacks of all threads, and wait until they have been written."""
        title = f"=== rank {self.rank}, process {self.number} on {self.host} ==="
        return f"{title}\n{self._stacks() if self.is_visible() else 'not there any more'}"

    def _stacks(self) -> str:
        with contextlib.suppress(OSError):
            os.kill(self.number, signal.SIGUSR1)
            _await_writer(self.stacks, timeout_s=2.0)
            return _of_test(Path(self.stacks).read_text()) or "no stacks came"
        return "it cannot be asked for its stacks"


@cache
def this_process(rank: int) -> Process:
    """This process, which is that rank and which from now on dumps its stacks on SIGUSR1."""
    file = _stacks_file()
    # The handler is C code that needs no interpreter: it works inside a blocking C++ call.
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    return Process(rank=rank, host=socket.gethostname(), number=os.getpid(), stacks=file.name)


@cache
def _stacks_file() -> IO[str]:
    """Kept open by the cache: faulthandler holds on to the file's number only."""
    return tempfile.NamedTemporaryFile("w", suffix=".stacks")


def _of_test(stacks: str) -> str:
    """Without what says nothing: threads that wait, and pytest's frames below the test function."""
    blocks: list[list[str]] = []
    for line in filter(None, stacks.splitlines()):
        if not line.startswith("  "):
            blocks.append([])
        blocks[-1].append(line)
    busy = [block for block in blocks if not all("/threading.py" in line for line in block[1:])]
    return "\n".join(line for block in busy for line in itertools.takewhile(_is_above, block))


def _is_above(line: str) -> bool:
    return "/_pytest/python.py" not in line


def _await_writer(path: str, timeout_s: float) -> None:
    """Wait until a file has something in it and has stopped growing."""
    before, deadline = 0, time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(0.1)
        size = os.path.getsize(path)
        if size and size == before:
            return
        before = size
