"""The backend mpi on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backend_suite import *  # noqa: F403  the tests that every backend passes

from mdfuse.backends.mpi import mpi_library as mpi_library
from mdfuse.backends.mpi.mpi_backend import MpiBackend
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call
from mdfuse.torch_private import PrefixStore

pytestmark = pytest.mark.backend("mpi")

TEAM = (2, 0, 3, 1)


def impatient(comm: Any, name: str) -> MpiBackend:
    """A backend beside the communicator's, with a deadline that a test can wait for."""
    store = PrefixStore(name, comm.store)
    return MpiBackend(rank=comm.rank, device=torch.device("cpu"), store=store, timeout_s=0.3)


@pytest.mark.world(4)
def test_the_backend_is_mpi(comm: Any) -> None:
    assert comm.backend == "mpi"
    assert mpi_library._queries(mpi_library.library()), "whether it takes device memory"


@pytest.mark.world(4)
def test_a_member_that_posts_nothing_is_a_timeout_not_a_hang(comm: Any) -> None:
    backend = impatient(comm, "test_posts_nothing")
    backend.prepare([TEAM])
    comm.barrier()
    if comm.rank != 2:
        call = Call(kind="Allreduce", team=TEAM, rank=comm.rank, reduce_op="sum")
        x = torch.ones(4)
        work = backend.bind(call)([x], [x])
        for _ in range(2):
            with pytest.raises(BackendError, match=f"Allreduce failed on rank {comm.rank}") as told:
                work.wait()
        assert "team (2, 0, 3, 1)" in str(told.value)
        assert "not done within 0.3 s of the wait" in str(told.value)
        assert "raise timeout_s" in str(told.value)
    comm.barrier()
    backend.close()


@pytest.mark.world(4)
def test_a_member_that_does_not_prepare_is_a_timeout_not_a_hang(comm: Any) -> None:
    backend = impatient(comm, "test_does_not_prepare")
    if comm.rank != 2:
        with pytest.raises(BackendError, match=f"mpi cannot connect rank {comm.rank}"):
            backend.prepare([TEAM])
    comm.barrier()


@pytest.mark.world(4)
def test_sizes_that_do_not_fit_are_an_error(comm: Any) -> None:
    backend = impatient(comm, "test_sizes")
    backend.prepare([TEAM])
    if comm.rank in (0, 1):
        peer = 1 - comm.rank
        is_sender = comm.rank == 0
        call = Call(
            kind="SendRecv",
            team=TEAM,
            rank=comm.rank,
            sends=(peer,) if is_sender else (),
            recvs=() if is_sender else (peer,),
        )
        post = backend.bind(call)
        if is_sender:
            post([torch.ones(5)], []).wait()
        else:
            with pytest.raises(BackendError, match="SendRecv failed on rank 1"):
                post([], [torch.ones(3)]).wait()
    comm.barrier()
    backend.close()


@pytest.mark.world(4)
def test_close_waits_for_nobody(comm: Any) -> None:
    backend = impatient(comm, "test_close")
    backend.prepare([TEAM])
    comm.barrier()
    if comm.rank == 1:
        backend.close()
        comm.store.set("test_close/closed", "")
    comm.store.wait(["test_close/closed"])
    backend.close()
    backend.close()
