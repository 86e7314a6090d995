"""The backend ucx on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backend_suite import *  # noqa: F403  the tests that every backend passes

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard

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
    got = mf.compile(fd).run(whole.chunk(4)[comm.rank], parts[comm.rank])
    total = parts.sum(0)
    want = [whole, total, total.chunk(4, 1)[comm.rank], whole.chunk(4, 1)[comm.rank]]
    for found, expected in zip(got, want, strict=True):
        assert torch.equal(found, expected)
