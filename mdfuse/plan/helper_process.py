"""Helper processes: each compiles functions into files, one after the other, until its rank ends.

One process imports what compiles, while the rank imports a module or lowers its program, and forks
the helpers; each forks the processes that compile its kernels. So a rank's helpers import it once
together. The process that forks uses no GPU, which those below it could not use then. A helper
joins no job of a launcher, and has a session of its own, so that all processes below it end with
it.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

from mdfuse.errors import reason

if TYPE_CHECKING:
    from mdfuse.plan.artefacts import Artefacts

#: Seconds between two looks whether the process above lives. Mostly the rank's end closes the
#: connection, unless another process has inherited the rank's side.
_LOOK_S = 1.0


def main(descriptors: str, rank: int) -> NoReturn:
    """Become the only helper, or fork one for each connection.

    Args:
        descriptors: of this side of the connections, with commas between them.
        rank: the number of the rank's process.
    """
    connections = [Connection(int(x)) for x in descriptors.split(",")]
    threading.Thread(target=_look_after, args=(rank,), daemon=True).start()
    try:
        from mdfuse.plan import inductor

        inductor.get_ready_to_compile()
        why = None
    except Exception as error:  # whatever an import raises
        why = reason(error)
    if len(connections) == 1:
        _help(connections[0], why, rank)
    gc.freeze()  # helpers share the memory of what is imported
    helpers, above = dict[int, Connection](), os.getpid()
    for n, connection in enumerate(connections):
        try:
            pid = os.fork()
        except OSError as error:  # there can be no further process
            connection.send(error.errno)
            connection.close()
            continue
        if not pid:
            _close([*helpers.values(), *connections[n + 1 :]])
            _forked(connection, why, above)
        helpers[pid] = connection
    _tell_ends(helpers)


def _look_after(rank: int) -> None:
    """End this process once the rank is gone."""
    while os.getppid() == rank:
        time.sleep(_LOOK_S)
    _end()


def _tell_ends(helpers: dict[int, Connection]) -> NoReturn:
    """Tell the rank how each helper ends; end with the last one."""
    while helpers:
        pid, status = os.wait()
        connection = helpers.pop(pid)
        with suppress(OSError):  # the rank is gone
            connection.send(os.waitstatus_to_exitcode(status))
        connection.close()
    _end()


def _close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()


# -- one helper ------------------------------------------------------------------------------------


def _forked(connection: Connection, why: str | None, above: int) -> NoReturn:
    """Be a helper that was forked; one that could not use a GPU begins anew, and imports by itself.

    Args:
        connection: with the rank.
        why: nothing can be compiled.
        above: the process with which it ends.
    """
    os.setsid()
    if why is None:
        from mdfuse.plan import inductor

        if inductor.is_lost_to_gpus():
            where = str(connection.fileno()), str(above)
            os.execv(sys.executable, [*sys.orig_argv[:-2], *where])
    _help(connection, why, above)


def _help(connection: Connection, why: str | None, above: int) -> NoReturn:
    """Compile what comes over a connection, after the rank's settings.

    Args:
        connection: with the rank.
        why: nothing can be compiled.
        above: the process with which it ends.
    """
    try:
        from mdfuse.plan import inductor

        inductor.fork_workers()  # before there is another thread
    except Exception as error:  # whatever torch raises
        why = why or reason(error)
    jobs = SimpleQueue[bytes]()
    threading.Thread(target=_listen, args=(connection, jobs, above), daemon=True).start()
    with suppress(OSError):  # the rank is gone
        connection.send((os.getpid(), why))
        if why is None:
            _warm_up(jobs.get())
        while why is None:
            connection.send(_answer(*pickle.loads(jobs.get())))
    _end()


def _listen(connection: Connection, jobs: SimpleQueue[bytes], above: int) -> None:
    """Take jobs; end this process, whatever it does, once the rank is gone."""
    try:
        while connection.poll(_LOOK_S) or os.getppid() == above:
            if connection.poll(0):
                jobs.put(connection.recv_bytes())
    except (EOFError, OSError):
        pass
    finally:
        _end()


#: The folder in which a function is being compiled.
_AT: list[Artefacts] = []


def _end() -> NoReturn:
    """End this process, and those below it, among them compilers."""
    for folder in _AT:
        folder.remove_parts(os.getpid())
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _warm_up(settings: bytes) -> None:
    """Compile a first function while the rank has none yet: it takes longer than later ones."""
    from mdfuse.plan import inductor
    from mdfuse.plan.packed_graphs import assume_packed

    with suppress(Exception):  # a job that needs the same says why
        device = assume_packed(settings)
        inductor.compile_example(device)


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
