"""The backend ucx on real ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import test_backend_c10d as kinds
import torch
from backend_suite import *  # noqa: F403  the tests that every backend passes
from backend_suite import TWO, each

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard
from mdfuse.backends.ucx import ucx_backend as ucx
from mdfuse.torch_private import PrefixStore

pytestmark = pytest.mark.backend("ucx")


@pytest.mark.world(4)
def test_the_backend_is_ucx(comm: Any) -> None:
    assert comm.backend == "ucx"


@pytest.mark.world(4)
def test_large_communications_in_steps(comm: mf.Communicator) -> None:
    """More than goes in one step: rings, trees and blocks."""
    mesh = DeviceMesh.arange(tp=4)
    with mf.FusionDefinition("large") as fd:
        x = fd.define_tensor([512, 600], mesh=mesh, layout={"tp": Shard(0)})
        p = fd.define_tensor([512, 600], mesh=mesh, layout={"tp": Partial("sum")})
        fd.add_output(fd.ops.set(x).on(mesh))
        fd.add_output(fd.ops.set(p).on(mesh))
        fd.add_output(fd.ops.set(p).on(mesh, {"tp": Shard(1)}))
        fd.add_output(fd.ops.set(x).on(mesh, {"tp": Shard(1)}))
    draw = torch.Generator().manual_seed(5)
    whole = torch.randint(-99, 99, (512, 600), generator=draw).float()
    parts = torch.randint(-99, 99, (4, 512, 600), generator=draw).float()
    mine = [x.to(comm.device) for x in (whole.chunk(4)[comm.rank], parts[comm.rank])]
    got = mf.compile(fd).run(*mine)
    total = parts.sum(0)
    want = [whole, total, total.chunk(4, 1)[comm.rank], whole.chunk(4, 1)[comm.rank]]
    for found, expected in zip(got, want, strict=True):
        assert torch.equal(found.cpu(), expected)


# -- on GPUs ---------------------------------------------------------------------------------------


def beside(comm: Any, name: str) -> Any:
    """A backend beside the communicator's, as tests use one."""
    store = PrefixStore(name, comm.store)
    backend = ucx.UcxBackend(rank=comm.rank, device=comm.device, store=store, timeout_s=30)
    return SimpleNamespace(
        rank=comm.rank,
        device=comm.device,
        prepare=backend.prepare,
        poster=backend.bind,
        backend=backend,
    )


@pytest.mark.gpu
@pytest.mark.world(2)
def test_ucx_moves_device_memory_itself(comm: Any, caplog: pytest.LogCaptureFixture) -> None:
    beside(comm, "test_itself").backend.close()
    assert comm.device.type == "cuda"
    assert not caplog.messages


@pytest.mark.gpu
@pytest.mark.world(2)
@pytest.mark.usefixtures("holding_up")
def test_where_it_does_not(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "why_staged", lambda transports: "for the test")
    staged = beside(comm, "test_staged")
    dtypes = [torch.float32, torch.bfloat16, torch.bool]
    each(kinds.test_allreduce, staged, TWO, dtypes, [7, 300_001])
    each(kinds.test_allgather, staged, TWO, dtypes, [0, 5, 300_001])
    each(kinds.test_exchange, staged, ["Exchange"], ["two"], TWO, dtypes)
    comm.barrier()
    staged.backend.close()
