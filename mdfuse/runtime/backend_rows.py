"""The table of backends: the devices of each, the reason why it is unusable, its opener."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from mdfuse.backends.base import Backend
from mdfuse.backends.c10d.c10d_backend import C10dBackend
from mdfuse.backends.c10d.group_openers import LIBRARIES
from mdfuse.backends.mpi import mpi_library as mpi_library
from mdfuse.backends.mpi.mpi_backend import MpiBackend
from mdfuse.backends.symmetric.cuda_memory import ask_for_queues
from mdfuse.backends.symmetric.host_memory import why_not as why_not_symmetric
from mdfuse.backends.symmetric.providers import OUTBOX_BYTES
from mdfuse.backends.symmetric.symmetric_backend import SymmetricBackend
from mdfuse.backends.ucx import ucx_library as ucx_library
from mdfuse.backends.ucx.ucx_backend import UcxBackend
from mdfuse.bootstrap import Launch, gloo_devices
from mdfuse.runtime.fast_lane import Lanes, agree_on_lanes
from mdfuse.runtime.watch.watch import Watch
from mdfuse.torch_private import PrefixStore, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The arguments with which a backend is opened.

    Attributes:
        launch: rank, size, and launcher.
        device: where this rank's buffers are.
        store: shared by all ranks, for this backend alone.
        timeout_s: deadline of a communication, seconds.
        lanes: opens the fast lanes of teams; None where a rank lacks them.
        watch: the watchdog of this process; None: there is none.
    """

    launch: Launch
    device: torch.device
    store: Store
    timeout_s: float
    lanes: Lanes | None = None
    watch: Watch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """A backend that `Options.backend` may name.

    Attributes:
        devices: device types whose buffers it carries, the preferred one first.
        why_not: returns a reason why this process cannot use it and a remedy, or None.
        open: makes the backend.
        can_capture: its posts can be captured in CUDA graphs.
        load: called before the ranks meet, for a library that must be loaded before MPI: ranks may
            meet by MPI.
        agree: settles with all ranks, when they meet, whether teams have fast lanes; None: the
            backend has none.
        staging: device type -> bytes of staging memory that a rank has for each of its teams; none:
            the backend reads and writes the buffers directly.
        takes_turns: its posts on GPUs and the replays of graphs take turns as the host queues them,
            so that a graph of the caller's cannot hold any.
    """

    devices: tuple[str, ...]
    why_not: Callable[[], tuple[str, str] | None]
    open: Callable[[World], Backend]
    can_capture: bool = True
    load: Callable[[], object] = lambda: None
    agree: Callable[..., Lanes | None] | None = None
    staging: Mapping[str, int] = field(default_factory=dict)
    takes_turns: bool = False


def _place(world: World) -> dict[str, Any]:
    """Return what each backend is told of this rank."""
    return {
        "rank": world.launch.rank, "device": world.device, "store": world.store,
        "timeout_s": world.timeout_s,
    }  # fmt: skip


def _c10d_row(name: str, agree: Callable[..., Lanes | None] | None = None) -> BackendRow:
    def open_c10d(world: World) -> Backend:
        return C10dBackend(
            name, **_place(world), network=gloo_devices(os.environ, world.launch), lanes=world.lanes
        )

    library = LIBRARIES[name]
    return BackendRow(devices=library.devices, why_not=library.why_not, open=open_c10d, agree=agree)


def _open_mpi(world: World) -> Backend:
    return MpiBackend(**_place(world))


def _open_ucx(world: World) -> Backend:
    return UcxBackend(**_place(world), is_one_host=world.launch.is_one_host)


def _open_symmetric(world: World) -> Backend:
    instead = partial(_open_instead, world)
    return SymmetricBackend(**_place(world), noter=world.watch, instead=instead)


def _open_instead(world: World) -> Backend:
    """Open the backend of teams whose members do not see each other's memory."""
    name = "nccl" if world.device.type == "cuda" else "gloo"
    store = PrefixStore("instead", world.store)
    return BACKENDS[name].open(replace(world, store=store, lanes=None))


BACKENDS: dict[str, BackendRow] = {
    **{name: _c10d_row(name) for name in LIBRARIES},
    "nccl": _c10d_row("nccl", agree_on_lanes),
    "mpi": BackendRow(
        devices=("cuda", "cpu"), why_not=mpi_library.why_not, open=_open_mpi, can_capture=False
    ),
    "ucx": BackendRow(
        devices=("cuda", "cpu"),
        why_not=ucx_library.why_not,
        open=_open_ucx,
        can_capture=False,
        load=ucx_library.why_not,  # before MPI
    ),
    "symmetric": BackendRow(
        devices=("cuda", "cpu"),
        why_not=why_not_symmetric,
        open=_open_symmetric,
        load=ask_for_queues,  # before CUDA
        staging=OUTBOX_BYTES,
        takes_turns=True,
    ),
}


def why_not(name: str) -> tuple[str, str] | None:
    """Return why this process cannot use a backend, and a remedy; None where it can."""
    if name not in BACKENDS:
        return "there is no such backend", f"choose one of auto, {', '.join(BACKENDS)}"
    return BACKENDS[name].why_not()


def auto() -> tuple[str, str]:
    """Return the backend that "auto" stands for in this process, and why."""
    refusal = BACKENDS["nccl"].why_not()
    if refusal is None:
        return "nccl", "this process has a GPU"
    return "gloo", f"nccl cannot be used: {refusal[0]}"
