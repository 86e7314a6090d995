"""Load the library UCX through ucxx, or return why this process cannot use it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

#: Settings of UCX.
#: - KEEPALIVE_INTERVAL: how often UCX checks that a rank from which something is expected lives,
#:   where that does not show by itself (its default is 20 s).
#: - MM_ERROR_HANDLING: use shared memory with these checks; otherwise UCX takes TCP over the
#:   loopback where errors must be noticed (1 MiB between two ranks: 0.1 ms against 2).
#: - SYSV_FIFO_SIZE: lets a sender be 4 MiB ahead in shared memory, not 2, so that ranks which share
#:   a core take fewer turns (all-reduce of 8 MiB, 4 ranks on 2 cores: 33 ms against 58).
#: - SYSV_RX_BUFS_GROW: keeps up to 16 MiB of pieces in one segment. A segment of a dead rank to
#:   which nothing was sent before cannot be attached, so that UCX would not see that it is dead.
_SETTINGS = {
    "KEEPALIVE_INTERVAL": "300ms",
    "MM_ERROR_HANDLING": "y",
    "SYSV_FIFO_SIZE": "512",
    "SYSV_RX_BUFS_GROW": "2048",
}

#: Variables set before ucxx is imported, which sets some itself. The first silences warnings about
#: those of a UCX without CUDA. The second is the size from which a sender first asks the receiver:
#: UCX chooses it by transport, where ucxx sets 8 KiB (all-reduce of 64 KiB, 4 ranks on 2 cores:
#: 1.5 ms against 2.6).
_ENVIRONMENT = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_RNDV_THRESH": "auto"}

#: The transports that access device memory, also on behalf of transports that cannot.
_DEVICE_TRANSPORT = "cuda_copy"

_INSTALL = 'pip install "mdfuse[ucx]" (ucxx; it needs no GPU), or use backend="gloo"'
_LOAD_FIRST = (
    'load UCX before MPI: import mpi4py.MPI after mdfuse.init(backend="ucx"), or call '
    "libucx.load_library() first"
)


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """The parts of ucxx that mdfuse uses; ucxx has no type information.

    Attributes:
        api: the module of its classes.
        array: the class of buffers that requests take.
        error: the base class of its errors.
    """

    api: Any
    array: Any
    error: type[Exception]

    def open_worker(self, is_one_host: bool = False) -> tuple[Any, Any]:
        """Return a context of UCX and a worker in it."""
        api = self.api
        context = api.UCXContext(
            settings(os.environ, is_one_host), (api.Feature.TAG, api.Feature.WAKEUP)
        )
        worker = api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        return context, worker


@cache
def load() -> UcxLibrary:
    """Load UCX, which must happen before MPI is loaded: MPI may bring an older UCX of its own.

    Raises:
        ImportError: ucxx is not installed, or cannot be used.
        OSError: another UCX was loaded first.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with suppress(ModuleNotFoundError):  # where ucxx was built for a UCX of the system
        importlib.import_module("libucx").load_library()
    api = importlib.import_module("ucxx._lib.libucxx")
    array = importlib.import_module("ucxx._lib.arr").Array
    return UcxLibrary(api=api, array=array, error=api.UCXError)


def why_not() -> tuple[str, str] | None:
    """Load UCX; return a reason why this process cannot use it and a remedy, or None."""
    try:
        load()
    except ModuleNotFoundError as error:
        return f"{(error.name or 'ucxx').partition('.')[0]} is not installed", _INSTALL
    except (ImportError, OSError) as error:
        return f"UCX cannot be loaded: {str(error).splitlines()[0]}", _LOAD_FIRST
    return None


def why_staged(transports: str) -> str | None:
    """Return why UCX cannot move device memory here; None where it can.

    Args:
        transports: the description of a UCX context (`UCXContext.info`). ucxx's own answer
            (`UCXContext.cuda_support`) reflects the request, and is yes without a GPU.
    """
    if f" {_DEVICE_TRANSPORT}/" in transports:
        return None
    return (
        f"UCX has no transport {_DEVICE_TRANSPORT} here: no CUDA driver, or UCX_TLS leaves it out"
    )


def settings(environment: Mapping[str, str], is_one_host: bool = False) -> dict[str, str]:
    """Return the settings for UCX, without those that the user's variables set.

    On one host UCX is confined to the loopback; by itself it listens on all interfaces.
    """
    variables = {k: v for k, v in _SETTINGS.items() if f"UCX_{k}" not in environment}
    if is_one_host and "UCX_NET_DEVICES" not in environment and "UCX_TLS" not in environment:
        variables["NET_DEVICES"] = "lo"
    return variables
