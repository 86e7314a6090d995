"""Programs with symbolic extents on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import is_close, local_part
from helpers.symbolic_programs import CASES, defined, guards, inputs

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard

#: On four ranks.
NAMES = [name for name in CASES if name != "two_meshes"]


def parts(program: mf.Program, whole: list[Any], comm: mf.Communicator) -> list[Any]:
    """This rank's part of each input."""
    layouts = [program.fusion.layout(name) for name in program.fusion.inputs]
    return [
        mf.shard_tensor(x, layout, rank=comm.rank).to(comm.device) if comm.rank in layout.mesh
        else None
        for x, layout in zip(whole, layouts, strict=True)
    ]  # fmt: skip


def check(program: mf.Program, name: str, n: int, comm: mf.Communicator) -> None:
    given = inputs(name, n)
    symbols = program.lowerings[0].assumed.examples
    (got,) = program.run(*parts(program, given, comm), extents=dict.fromkeys(symbols, n))
    layout = program.fusion.layout(program.fusion.outputs[0])
    assert is_close(got.cpu(), local_part(CASES[name][2](*given), layout, comm.rank)), (name, n)


@pytest.mark.world(4)
@pytest.mark.parametrize("name", NAMES)
def test_several_extents(name: str, comm: mf.Communicator) -> None:
    """Some twice: what was made for them is used again."""
    program = mf.compile(defined(name))
    for n in (8, 5, 8, 7, 1, 12, 5):
        check(program, name, n, comm)
    assert len(program.lowerings) <= 5, guards(program)


@pytest.mark.world(4)
def test_what_every_rank_sees_need_not_be_given(comm: mf.Communicator) -> None:
    mesh = DeviceMesh.arange(tp=4)
    with mf.FusionDefinition("seen") as fd:
        x = fd.define_tensor([-1, 8], mesh=mesh)
        w = fd.define_tensor([8, 8], mesh=mesh, layout={"tp": Shard(1)})
        fd.add_output(fd.ops.set(x @ w).on(mesh, {}))
    program = mf.compile(fd)
    for n in (4, 9):
        x, w = torch.ones(n, 8), torch.eye(8)
        (got,) = program.run(*parts(program, [x, w], comm))
        assert is_close(got.cpu(), x)
    assert len(program.lowerings) == 1


@pytest.mark.world(4)
def test_what_is_missing_is_missing_on_every_rank(comm: mf.Communicator) -> None:
    """And the ranks go on together afterwards."""
    program = mf.compile(defined("gathered"))
    given = parts(program, inputs("gathered", 8), comm)
    for _ in range(2):
        with pytest.raises(mf.ProgramError, match=r"the extents x\.0 are missing"):
            program.run(*given)
        with pytest.raises(mf.ProgramError, match=r"x\.0 is 13, but dim 0 of %x has"):
            program.run(*given, extents={"x.0": 13})
        check(program, "gathered", 8, comm)


@pytest.mark.world(4)
def test_one_rank_with_other_extents(comm: mf.Communicator) -> None:
    """All ranks refuse what one of them must refuse."""
    program = mf.compile(defined("gathered"))
    given = parts(program, inputs("gathered", 8), comm)
    with pytest.raises(mf.ProgramError, match=r"rank 2 refused|x\.0=-3"):
        program.run(*given, extents={"x.0": -3 if comm.rank == 2 else 8})
    check(program, "gathered", 8, comm)


@pytest.mark.world(4)
def test_what_some_rank_does_not_see_must_be_given(comm: mf.Communicator) -> None:
    first = Layout(DeviceMesh([0, 1]))
    with mf.FusionDefinition("pipeline") as fd:
        x = fd.define_tensor([-1, 3], mesh=first)
        fd.add_output(fd.ops.set(x + 1).on(DeviceMesh([2, 3]), {"x": Shard(0)}))
    program = mf.compile(fd)
    x = torch.ones(5, 3)
    mine = x.to(comm.device) if comm.rank < 2 else None
    with pytest.raises(mf.ProgramError, match=r"the extents x\.0 are missing"):
        program.run(mine)
    (got,) = program.run(mine, extents={"x.0": 5})
    if comm.rank < 2:
        assert got is None
    else:
        assert is_close(got.cpu(), (x + 1).chunk(2)[comm.rank - 2])


@pytest.mark.world(4)
@pytest.mark.parametrize("odd", [0, 1])
def test_extents_that_differ_between_ranks(odd: int, comm: mf.Communicator) -> None:
    """Two rows fit both 7 and 8, so that no rank can tell by itself."""
    mesh = DeviceMesh.arange(tp=4)
    with mf.FusionDefinition("gathered") as fd:
        x = fd.define_tensor([-1, 3], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    program, whole = mf.compile(fd), torch.arange(24.0).view(8, 3)
    (mine,) = parts(program, [whole], comm)
    with pytest.raises(mf.ProgramError, match=f"rank {odd} runs another program") as caught:
        program.run(mine, extents={"x.0": 7 if comm.rank == odd else 8})
    assert "(7, 3)" in str(caught.value) and "(8, 3)" in str(caught.value)
    assert "pass the same extents=" in str(caught.value)
    (got,) = program.run(mine, extents={"x.0": 8})
    assert torch.equal(got.cpu(), whole)
