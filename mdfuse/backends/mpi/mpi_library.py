"""Start, query and end the MPI of this process, or say why it cannot be used."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mdfuse.backends.c10d.group_openers import default_group
from mdfuse.bootstrap import Launch, detect
from mdfuse.errors import BackendError

_INSTALL = (
    "pip install 'mdfuse[mpi]', or mpi4py built for the MPI that starts the ranks; or use another "
    "backend"
)

#: Query functions beyond the standard, and the arguments that ask each whether pointers to CUDA
#: memory may be passed: Open MPI and MVAPICH have the first, MPICH and its derivatives the second.
_QUERIES: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("MPIX_Query_cuda_support", lambda query: query() == 1),
    ("MPIX_GPU_query_support", lambda query: _answer_by_reference(query)),
)

#: Libraries that take device memory only where a variable says so: a part of their version text
#: -> (variable, the value it needs).
_SWITCHES = {
    "MVAPICH": ("MV2_USE_CUDA", "1"),
    "CRAY MPICH": ("MPICH_GPU_SUPPORT_ENABLED", "1"),
}

#: mpi4py's names of MPI's error handlers, and MPI's names for them.
_ERRORS = {
    "exception": "ERRORS_RETURN",
    "fatal": "ERRORS_ARE_FATAL",
    "abort": "ERRORS_ABORT",
}

#: MPICH's number for CUDA in its query.
_CUDA = 0


def library() -> Any:
    """Return mpi4py's module; the first call starts MPI, which waits for all ranks.

    Raises:
        BackendError: mpi4py, or the MPI that it was built for, cannot be loaded.
    """
    try:
        mpi = _started()
    except (ImportError, RuntimeError) as error:
        because = str(error).split("\n", 1)[0]
        raise BackendError("mpi4py cannot be imported", because=because, hint=_INSTALL) from error
    atexit.unregister(_end)
    atexit.register(_end, mpi)
    return mpi


def _started() -> Any:
    """Import mpi4py's module and start MPI, unless the program has done so.

    By itself mpi4py starts MPI as it is imported, and ends it after Python's end. Both wait for all
    ranks, and no other thread could run meanwhile to see that the wait takes too long.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is not None:
        return module
    rc = importlib.import_module("mpi4py").rc
    chosen = rc.initialize, rc.finalize
    rc.initialize = rc.finalize = False
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    finally:
        rc.initialize, rc.finalize = chosen
    if rc.initialize and not mpi.Is_initialized():
        level = getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else 0
        failure = _linked(mpi).MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
        if failure:
            raise RuntimeError(f"MPI_Init_thread failed (error {failure})")
        if rc.errors in _ERRORS:
            for world in (mpi.COMM_WORLD, mpi.COMM_SELF):
                world.Set_errhandler(getattr(mpi, _ERRORS[rc.errors]))
    _note_aborts(mpi)
    return mpi


def _linked(mpi: Any) -> Any:
    """Return the MPI behind mpi4py, whose functions are called without Python's lock."""
    return ctypes.CDLL(mpi.__file__)


def _note_aborts(mpi: Any) -> None:
    """Note each request to mpi4py to abort the job when Python ends."""
    set_status = mpi._set_abort_status

    def noted(status: int) -> None:
        _end_state.aborts = bool(status)
        set_status(status)

    mpi._set_abort_status = noted


@dataclass(slots=True)
class _EndState:
    """The way to end MPI: mpi4py aborts the whole job, or MPI_Finalize is called in a context."""

    aborts: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext


_end_state = _EndState()


def end_within(around: Callable[[], AbstractContextManager[object]]) -> None:
    """Call MPI_Finalize, which waits for all ranks, inside a context that `around` makes."""
    _end_state.around = around


def keeps_ranks_together(launch: Launch) -> bool:
    """Return whether no rank of a launch can end before all have come to MPI_Finalize."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    ends = importlib.import_module("mpi4py").rc.finalize is not False
    return ends and bool(mpi.COMM_WORLD.Get_size() == launch.size)


def leave_to_parent() -> None:
    """Do not end MPI in this process: it is a fork, and MPI belongs to its parent."""
    atexit.unregister(_end)


def _end(mpi: Any) -> None:
    """End MPI; abort the whole job where this process ends by an error, as `-m mpi4py` does.

    After an error MPI_Finalize would wait for ranks that may be waiting for this one.
    """
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if getattr(sys, "last_value", None) is not None and mpi.COMM_WORLD.Get_size() > 1:
        importlib.import_module("mpi4py.run").set_abort_status(1)
    elif not _end_state.aborts and importlib.import_module("mpi4py").rc.finalize is not False:
        with _end_state.around():
            _linked(mpi).MPI_Finalize()


def why_not() -> tuple[str, str] | None:
    """Return a reason why this process cannot use MPI and a remedy, or None.

    A single process only needs mpi4py to be installed; MPI is not started there.
    """
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed", _INSTALL
    try:
        launch = detect(os.environ, default_group())
    except BackendError as error:  # no backend knows the launcher
        return error.what, error.hint or _INSTALL
    return None if launch.size == 1 else why_not_in(launch)


def why_not_in(launch: Launch) -> tuple[str, str] | None:
    """Return why MPI's world is not that of a launch, and a remedy; None where it is."""
    try:
        world = library().COMM_WORLD
    except BackendError as error:
        return f"{error.what}: {error.because}", _INSTALL
    seen = world.Get_rank(), world.Get_size()
    if seen == (launch.rank, launch.size):
        return None
    return (
        f"MPI sees rank {seen[0]} of {seen[1]}, {launch.name} says rank {launch.rank} of "
        f"{launch.size}",
        "start the ranks with the mpirun of mpi4py's own MPI (mpirun -n 4 python -m mpi4py ...; "
        'srun: --mpi=pmix), or use backend="gloo" or "nccl"',
    )


def why_staged(mpi: Any, environment: Mapping[str, str]) -> str | None:
    """Return why MPI must not be given pointers to device memory; None where it takes them.

    An MPI that does not take them would end the process, so that no answer counts as a refusal.
    """
    version = mpi.Get_library_version().split("\n", 1)[0].split(",", 1)[0].strip()
    for part, (variable, needed) in _SWITCHES.items():
        if part in version and environment.get(variable) != needed:
            return f"{version} takes device memory only where {variable}={needed}"
    answers = [ask(query) for query, ask in _queries(mpi)]
    if any(answers):
        return None
    if answers:
        return f"{version} was built without CUDA"
    return f"{version} does not say whether it takes device memory"


def _queries(mpi: Any) -> list[tuple[Any, Callable[[Any], bool]]]:
    """Return the query functions that the MPI behind mpi4py has, with a call of each."""
    linked = _linked(mpi)
    return [(getattr(linked, name), ask) for name, ask in _QUERIES if hasattr(linked, name)]


def _answer_by_reference(query: Any) -> bool:
    answer = ctypes.c_int(0)
    return query(_CUDA, ctypes.byref(answer)) == 0 and bool(answer.value)
