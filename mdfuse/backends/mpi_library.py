"""The MPI of this process: whether it can be used here, and what it can do."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from mdfuse.errors import BackendError
from mdfuse.runtime.bootstrap import Launch, detect

_INSTALL = (
    "pip install 'mdfuse[mpi]', or mpi4py built for the MPI that starts the ranks; or use another "
    "backend"
)

#: Query functions beyond the standard, and how each is asked whether pointers to CUDA memory may
#: be passed: Open MPI and MVAPICH have the first, MPICH and what derives from it the second.
_QUERIES: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("MPIX_Query_cuda_support", lambda query: query() == 1),
    ("MPIX_GPU_query_support", lambda query: _answer_by_reference(query)),
)

#: Libraries that can take device memory only where a variable says so: what their version text
#: contains -> (variable, what it must be).
_SWITCHES = {
    "MVAPICH": ("MV2_USE_CUDA", "1"),
    "CRAY MPICH": ("MPICH_GPU_SUPPORT_ENABLED", "1"),
}

#: MPICH's number for CUDA in its query.
_CUDA = 0


def library() -> Any:
    """mpi4py's module; the first import initialises MPI.

    Raises:
        BackendError: mpi4py is not there, or not its MPI.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        because = str(error).split("\n", 1)[0]
        raise BackendError("mpi4py cannot be imported", because=because, hint=_INSTALL) from error
    atexit.unregister(_end_after_an_error)
    atexit.register(_end_after_an_error, mpi)
    return mpi


def _end_after_an_error(mpi: Any) -> None:
    """Have MPI end the job where this process ends by an error, as under `-m mpi4py`.

    mpi4py would call MPI_Finalize, which waits for ranks that may be waiting for this one.
    """
    has_failed = getattr(sys, "last_value", None) is not None
    if has_failed and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        importlib.import_module("mpi4py.run").set_abort_status(1)


def why_not() -> tuple[str, str] | None:
    """A reason why this process cannot use MPI and a remedy, or None.

    To ask does not start MPI in a single process, where only mpi4py must be there.
    """
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed", _INSTALL
    try:
        launch = detect(os.environ, _default_group())
    except BackendError as error:  # the launcher is unknown to all backends alike
        return error.what, error.hint or _INSTALL
    return None if launch.size == 1 else why_not_in(launch)


def why_not_in(launch: Launch) -> tuple[str, str] | None:
    """Why MPI's world is not that of a launch, and a remedy; None where it is."""
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
    """Why MPI must not be given pointers to device memory; None where it takes them.

    An MPI that does not would end the process, so that one that does not answer is taken for one.
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
    """The query functions that the MPI behind mpi4py has."""
    linked = ctypes.CDLL(mpi.__file__)
    return [(getattr(linked, name), ask) for name, ask in _QUERIES if hasattr(linked, name)]


def _answer_by_reference(query: Any) -> bool:
    answer = ctypes.c_int(0)
    return query(_CUDA, ctypes.byref(answer)) == 0 and bool(answer.value)


def _default_group() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None
