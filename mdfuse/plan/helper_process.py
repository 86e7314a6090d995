"""A helper process: it compiles functions into files, one after the other, until its rank ends.

It imports what compiles while the rank lowers its program. It joins no job of a launcher, and has a
session of its own, so that all processes below it end with it.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from mdfuse.errors import reason

if TYPE_CHECKING:
    from mdfuse.plan.artefacts import Artefacts

#: Seconds between two looks whether the rank lives. Mostly its end closes the connection, unless
#: another process has inherited the rank's side.
_LOOK_S = 1.0


def main(descriptor: int, rank: int) -> None:
    """Compile what comes over a connection.

    Args:
        descriptor: of this side.
        rank: the number of the rank's process.
    """
    connection, jobs = Connection(descriptor), SimpleQueue[bytes]()
    threading.Thread(target=_listen, args=(connection, jobs, rank), daemon=True).start()
    try:
        from mdfuse.plan import inductor

        inductor.get_ready_to_compile()
        why = None
    except Exception as error:  # whatever an import raises
        why = reason(error)
    connection.send(why)
    try:
        while why is None:
            connection.send(_answer(*pickle.loads(jobs.get())))
    except OSError:  # the rank is gone
        pass
    _end()


def _listen(connection: Connection, jobs: SimpleQueue[bytes], rank: int) -> None:
    """Take jobs; end this process, whatever it does, once the rank is gone."""
    try:
        while connection.poll(_LOOK_S) or os.getppid() == rank:
            if connection.poll(0):
                jobs.put(connection.recv_bytes())
    except (EOFError, OSError):
        pass
    finally:
        _end()


#: The folder in which a function is being compiled.
_AT: list[Artefacts] = []


def _end() -> None:
    """End this process, and those below it, among them compilers."""
    for folder in _AT:
        folder.remove_parts(os.getpid())
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _answer(folder: str, name: str, packed: bytes) -> tuple[bool, str | None]:
    """Compile a function into files.

    Returns:
        Whether it is there, or another process has begun it; else why not.
    """
    import torch

    from mdfuse.plan import inductor
    from mdfuse.plan.artefacts import Artefacts
    from mdfuse.plan.packed_graphs import unpacked

    _AT[:] = [artefacts := Artefacts(Path(folder))]
    why = None
    try:
        with artefacts.lock(name, 0.0) as is_mine:
            if not is_mine or artefacts.has(name):
                return False, None
            traced = unpacked(packed)
            why = artefacts.save(name, inductor.compiled(traced), traced.results)
    except Exception as error:  # the compiler raises errors of any type
        why = reason(error)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the rank needs the memory on which kernels were timed
    return why is None, why
