"""Different backends for different teams: what the option says, and what programs say then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import hir
from mdfuse.config import backend_choice
from mdfuse.layouts.call import Call
from mdfuse.plan.build import build
from mdfuse.plan.posts import groups

GRID = mf.DeviceMesh.arange(dp=2, tp=2)
PAIR = mf.DeviceMesh([4, 5], axes=("tp",))


def across() -> mf.FusionDefinition:
    """Partial sums along tp and dp, then to another mesh, sharded otherwise."""
    with mf.FusionDefinition("across") as fd:
        x = fd.define_tensor([4, 6], mesh=GRID, layout={"dp": mf.Shard(0), "tp": mf.Shard(1)})
        rows = fd.ops.set(fd.ops.sum(x, dims=[1])).on(GRID, {"dp": mf.Shard(0)})
        total = fd.ops.set(fd.ops.sum(rows, dims=[0])).on(GRID, {})
        fd.add_output(fd.ops.set(total + 1.0).on(PAIR, {}))
    return fd


@pytest.mark.parametrize(
    ("text", "usual", "by_axis"),
    [
        ("gloo", "gloo", {}),
        ("auto", "auto", {}),
        ("dp=mpi", "auto", {"dp": "mpi"}),
        ("nccl, dp=mpi, meshes = ucc", "nccl", {"dp": "mpi", "meshes": "ucc"}),
        ("dp=gloo,ucx", "ucx", {"dp": "gloo"}),
    ],
)
def test_what_the_option_says(text: str, usual: str, by_axis: dict[str, str]) -> None:
    found = backend_choice(text)
    assert (found.usual, found.by_axis) == (usual, by_axis)


@pytest.mark.parametrize(
    "text", ["", "gloo,", "gloo, mpi", "=mpi", "dp=", "dp=mpi, dp=ucx", "dp=auto", "a=b=c=", "x=,y"]
)
def test_what_is_no_choice(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mf.ProgramError, match="backend="):
        mf.Options(backend=text)
    monkeypatch.setenv("MDFUSE_BACKEND", text)
    if not text:  # an empty variable is as good as none
        mf.compile(across())
        return
    with pytest.raises(mf.ProgramError, match="MDFUSE_BACKEND="):
        mf.compile(across())


def test_posts_name_the_backend_of_their_axis() -> None:
    program = mf.compile(across(), mf.Options(backend="gloo, dp=mpi, meshes=ucx"))
    found = [(c.kind, c.axis, c.backend) for c in program.communications]
    assert found == [
        ("Allreduce", "tp", None),
        ("Allreduce", "dp", "mpi"),
        ("Broadcast", None, "ucx"),
    ]
    assert program.host.backends == ("mpi", "ucx")
    assert str(program).count("backend=") == 2
    assert hir.parse(str(program)) == program.host
    assert "Allreduce[sum] axis=dp backend=mpi" in program.explain()
    assert "graphs: none, because the host does the work of mpi and ucx" in program.explain()


def test_the_usual_backend_is_not_named() -> None:
    program = mf.compile(across(), mf.Options(backend="ucx"))
    assert program.host.backends == () and "backend=" not in str(program)


def test_posts_in_loops_name_theirs() -> None:
    with mf.FusionDefinition("loop") as fd:
        x = fd.define_tensor([8, 4], mesh=GRID, layout={"tp": mf.Shard(0)})
        w = fd.define_tensor([4, 4], mesh=GRID, layout={})
        whole = fd.ops.set(x).on(GRID, {}, stream=mf.Stream(0, 2))
        y = (whole @ w).on(GRID, {}, stream=mf.Stream(0, 2))
        fd.add_output(y)
    program = mf.compile(fd, mf.Options(backend="tp=mpi"))
    inside = [j.comm for i in program.host if i.op == "for" for j in i.walk() if j.comm]
    assert inside and all(c.backend == "mpi" for c in inside)


def test_a_barrier_names_one() -> None:
    text = """
host @meet on mesh(tp=2) {
  input %x: f32[2] (tp=R)
  barrier (tp=R) axis=tp backend=ucx
  return %x
}
"""
    program = hir.parse(text)
    assert program.backends == ("ucx",) and hir.parse(str(program)) == program
    bound: list[str | None] = []

    def bind(call: Call) -> Any:
        bound.append(call.backend)
        return lambda srcs, dsts: None

    build(program.project(0), bind, torch.device("cpu"), poison=False)
    assert bound == ["ucx"]
    assert groups(program.project(0), 0, "ucx") == [(0, 1)] and groups(program.project(0), 0) == []
