"""Wrong input on one rank is an error on every rank alike, before anything is posted."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Replicate, Shard

WORLD = DeviceMesh([0, 1, 2, 3])


def program(mesh: DeviceMesh = WORLD) -> mf.Program:
    with mf.FusionDefinition("gather") as fd:
        x = fd.define_tensor([8, 2], torch.float32, mesh, {"x": Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, {"x": Replicate()}))
    return mf.compile(fd)


WRONG: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "shape": (lambda x: x[:1], "shape"),
    "dtype": (lambda x: x.double(), "dtype"),
    "device": (lambda x: x.to("meta"), "meta"),
    "nothing": (lambda x: None, "NoneType"),
    "number": (lambda x: 3.0, "float"),
}


@pytest.mark.world(4)
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("guilty", [0, 2])
def test_one_wrong_argument(what: str, guilty: int, comm: mf.Communicator) -> None:
    spoil, word = WRONG[what]
    x = torch.ones(2, 2, device=comm.device)
    with pytest.raises(mf.ProgramError) as caught:
        program().run(spoil(x) if comm.rank == guilty else x)
    assert word in str(caught.value)
    assert f"rank {guilty}" in str(caught.value)


@pytest.mark.world(4)
def test_wrong_count(comm: mf.Communicator) -> None:
    x = torch.ones(2, 2, device=comm.device)
    with pytest.raises(mf.ProgramError, match="2 arguments for 1 input"):
        program().run(x, x)


@pytest.mark.world(4)
def test_too_few_processes(comm: mf.Communicator) -> None:
    with pytest.raises(mf.ProgramError, match=re.escape("ranks up to 7")) as caught:
        program(DeviceMesh.arange(x=8)).run(torch.ones(1, 2, device=comm.device))
    assert "start 8 processes" in str(caught.value)


@pytest.mark.world(4)
def test_ranks_that_see_other_hosts(comm: mf.Communicator) -> None:
    """Hosts decide what is posted, so that all ranks have to see the same."""
    mesh = WORLD.with_hosts([0, 0, 1, 1] if comm.rank != 2 else [0, 1, 1, 1])
    with pytest.raises(mf.ProgramError, match="rank 2 runs another program") as caught:
        program(mesh).run(torch.ones(2, 2, device=comm.device))
    assert "on 0*1 1*3" in str(caught.value)


@pytest.mark.world(4)
def test_the_world_is_usable_afterwards(comm: mf.Communicator) -> None:
    x = torch.full((2, 2), float(comm.rank), device=comm.device)
    (got,) = program().run(x)
    assert torch.equal(got.cpu(), torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 2))


@pytest.mark.world(4)
def test_all_ranks_refuse_a_later_run(comm: mf.Communicator) -> None:
    """Alike on all ranks it is an error of that run only."""
    ready = program()
    x = torch.ones(2, 2, device=comm.device)
    ready.run(x)
    with pytest.raises(mf.ProgramError, match="shape"):
        ready.run(x[:1])
    (got,) = ready.run(x)
    assert torch.equal(got.cpu(), torch.ones(8, 2))


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["smoke", "ucc"])
def test_a_backend_beside_the_usual_one_that_is_not_there(name: str, comm: mf.Communicator) -> None:
    """Before anything is posted, on all ranks; other programs go on."""
    if name == "ucc" and torch.distributed.is_ucc_available():
        name = "smoke"
    mesh = mf.DeviceMesh.arange(x=4)
    with mf.FusionDefinition("gather") as fd:
        x = fd.define_tensor([8], mesh=mesh, layout={"x": mf.Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    ready = mf.compile(fd, mf.Options(backend=f"x={name}"))
    mine = torch.full((2,), float(comm.rank), device=comm.device)
    for _ in range(2):
        with pytest.raises(mf.BackendError, match=f"backend '{name}'"):
            ready.run(mine)
    (got,) = mf.compile(fd).run(mine)
    assert torch.equal(got.cpu(), torch.arange(4.0).repeat_interleave(2))
