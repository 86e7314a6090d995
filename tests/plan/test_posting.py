"""Different backends for different teams: what the option says, and what programs say then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import hir
from mdfuse.config import backend_choice
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.check import verify
from mdfuse.layouts.call import Call
from mdfuse.plan.build import build
from mdfuse.plan.posting import groups

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

    build(project(program, 0), bind, torch.device("cpu"), poison=False)
    assert bound == ["ucx"]
    assert (
        groups(project(program, 0), 0, "ucx") == [(0, 1)] and groups(project(program, 0), 0) == []
    )


def ring(*backends: str) -> hir.HostProgram:
    """A turn of a ring along tp, whose send and receive name these backends."""
    send, recv = (f", backend={x}" if x else "" for x in backends)
    return hir.parse(f"""
host @ring on mesh(dp=2, tp=2) {{
  input %x: f32[2] of [4] (tp=S0)
  %y: f32[2] (tp=varies) = alloc
  group_start
  %c0 = send(%x, to=(coord(tp) + 1) mod 2, axis=tp{send})
  %c1 = recv(%y, from=(coord(tp) - 1) mod 2, axis=tp{recv})
  group_end
  wait %c0
  wait %c1
  return %y
}}""")


def test_rings_name_the_backend_of_their_axis() -> None:
    """And need the ranks along it alone, each of which the backend must reach."""
    with mf.FusionDefinition("ring") as fd:
        x = fd.define_tensor([8, 4], mesh=GRID, layout={"tp": mf.Shard(0)})
        w = fd.define_tensor([4, 4], mesh=GRID, layout={})
        around = mf.Stream(0, 2, rotate="tp")
        whole = fd.ops.set(x).on(GRID, {}, stream=around)
        fd.add_output((whole @ w).on(GRID, {}, stream=around))
    program = mf.compile(fd, mf.Options(backend="gloo, tp=symmetric"))
    sends = [i for i in program.host.walk() if i.op == "send"]
    assert [i.kwargs["backend"] for i in sends] == ["symmetric"]
    assert program.host.backends == ("symmetric",)
    assert hir.parse(str(program)) == program.host
    for rank, team in enumerate([(0, 1), (0, 1), (2, 3), (2, 3)]):
        local = project(program.host, rank)
        assert groups(local, rank, "symmetric") == groups(written_out(local), rank, "symmetric")
        assert groups(local, rank, "symmetric") == [team] and groups(local, rank) == []
        assert hir.parse(str(local)) == local
        assert {call.backend for call in calls_of(local)} == {"symmetric"}
        assert {call.team for call in calls_of(local)} == {team}
    assert "symmetric takes" in program.explain() and "at most 1" in program.explain()
    plain = mf.compile(fd, mf.Options(backend="gloo, dp=symmetric")).host
    assert plain.backends == () and groups(project(plain, 1), 1) == [(0, 1, 2, 3)]


def calls_of(program: hir.HostProgram) -> list[Call]:
    bound: list[Call] = []

    def bind(call: Call) -> Any:
        bound.append(call)
        return lambda srcs, dsts: None

    build(program, bind, torch.device("cpu"), poison=False)
    return bound


def test_a_send_and_its_receive_name_one_backend() -> None:
    for named in (("", ""), ("ucx", "ucx")):
        verify(ring(*named))
    for named in (("ucx", ""), ("", "ucx"), ("ucx", "mpi")):
        with pytest.raises(mf.CommunicationError, match=r"%c0 by .* among .* meets recv %c1 by"):
            verify(ring(*named))


def test_a_peer_that_the_backend_of_an_axis_need_not_reach() -> None:
    text = str(project(ring("ucx", "ucx"), 0)).replace("to=1", "to=2")
    assert "to=2, backend=ucx, along=tp" in text
    with pytest.raises(mf.ProgramError, match=r"to rank 2") as caught:
        build(hir.parse(text), lambda call: None, torch.device("cpu"), poison=False)  # type: ignore[arg-type,return-value]
    assert "the ranks (0, 1) along tp" in str(caught.value)
