"""The worlds of communicators: of ranks that a launcher started, and of one rank alone."""

from __future__ import annotations

import itertools
import os
from functools import partial

import torch

from mdfuse.backends.c10d.group_openers import default_group
from mdfuse.backends.mpi import mpi_library as mpi_library
from mdfuse.bootstrap import detect
from mdfuse.config import BackendChoice, Options
from mdfuse.errors import BackendError
from mdfuse.interpreter.threads import keep_ready
from mdfuse.runtime.backend_rows import BACKENDS, World, auto
from mdfuse.runtime.first_meeting import Door, last_meeting, watch_for
from mdfuse.runtime.membership import Membership
from mdfuse.runtime.null_world import null_device, null_launch
from mdfuse.runtime.stores import open_store
from mdfuse.torch_private import HashStore

#: Threads that stand ready for the end: two watch over MPI_Finalize, others over hanging calls.
AT_EXIT = 6

#: How many communicators this process made: all ranks make the same ones in the same order, so
#: the number keeps their keys apart in a store that outlives them.
_generations = itertools.count()


def loaded(carriers: BackendChoice) -> tuple[str, ...]:
    """Return the names of backends, the usual one first, with their libraries loaded."""
    for named in carriers.names:
        if named in BACKENDS:
            BACKENDS[named].load()
    usual = auto()[0] if carriers.usual == "auto" else carriers.usual
    return (usual, *carriers.others)


def door_of(carriers: BackendChoice, options: Options) -> Door:
    """Find the store of the ranks that the launcher started."""
    keep_ready(AT_EXIT)
    launch = detect(os.environ, default_group())
    names = loaded(carriers)
    watch = watch_for(launch, options, os.environ)
    if launch.size > 1:
        watch.start()
        mpi_library.end_within(partial(last_meeting, launch, options, os.environ))
    root = f"mdfuse/{next(_generations)}"
    try:
        base, is_host = open_store(launch, options.timeout_s, os.environ, watch)
    except BackendError:
        watch.close()
        raise
    return Door(
        launch=launch,
        names=names,
        options=options,
        base=base,
        root=root,
        is_host=is_host,
        watch=watch,
        membership=Membership.first(launch.size),
    )


def stand_in(
    rank: int | None, size: int | None, device: torch.device | str | None, timeout_s: float
) -> World:
    """Return the world of backend "null", whose store is a dictionary of this process."""
    store = HashStore()
    return World(
        launch=null_launch(os.environ, default_group(), rank, size),
        device=null_device(device),
        store=store,
        timeout_s=timeout_s,
    )
