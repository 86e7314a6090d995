"""The first piece of a ring is posted as soon as it is computed; values and orders stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify import verify
from mdfuse.hir.verify.flow import Flow
from mdfuse.hir.verify.types import check_types

SYMMETRIC = mf.Options(backend="symmetric")

Work = Callable[[Any, Any], Any]

#: How many pieces, or how long each is.
Pieces = int | tuple[int, ...]


def halved(x: Any, z: Any) -> Any:
    return x * 0.5


def normed(x: Any, z: Any) -> Any:
    return F.rms_norm(x, (x.shape[-1],), None, 1e-5)


def added(x: Any, z: Any) -> Any:
    return F.relu(x + z) * 2.0


def ring(
    work: Work,
    mesh: DeviceMesh,
    pieces: Pieces,
    *,
    rows: int = 16,
    dtype: torch.dtype = torch.float64,
    computed: Pieces | None = None,
    second: bool = False,
    kept: bool = False,
) -> mf.FusionDefinition:
    """A product of what is gathered in a ring; what is sent is computed in pieces, if asked for.

    Args:
        work: what computes what is sent, of two inputs.
        mesh: with an axis tp.
        pieces: in which each shard is sent, or their lengths.
        rows: of all ranks.
        dtype: of all.
        computed: the pieces in which what is sent is computed.
        second: whether something else reads what is sent.
        kept: whether what is gathered is an output, too.
    """
    around = Stream(0, pieces * mesh.axis_size("tp"), rotate="tp")
    stream = Stream(0, computed) if computed else None
    with mf.FusionDefinition("ring") as fd:
        x, z = (
            fd.define_tensor([rows, 6], dtype, mesh, {"tp": Shard(0)}, name=name) for name in "xz"
        )
        w = fd.define_tensor([6, 8], dtype, mesh, {"tp": Shard(1)}, name="w")
        t = work(x, z).on(mesh, {"tp": Shard(0)}, stream=stream)
        if second:  # before the ring
            fd.add_output(t.sum(1).on(mesh, {"tp": Shard(0)}))
        whole = fd.ops.set(t).on(mesh, {}, stream=around)
        fd.add_output((whole @ w).on(mesh, {"tp": Shard(1)}, stream=around))
        if kept:
            fd.add_output(whole)
    return fd


def run_of(program: mf.Program, rank: int) -> HostProgram:
    return program.for_rank(rank).written_out


def sent(program: HostProgram) -> list[tuple[int, str]]:
    """To whom a rank sends what, in order; pieces by the rows that they have."""
    return [
        (i.kwargs["to"], str(program.types[i.reads[0]].box(program.rank or 0)))
        for i in program.instructions
        if i.op == "send"
    ]


def ahead(program: HostProgram) -> int:
    """How many writes of what is sent come behind the first transfer with another rank."""
    code = program.instructions
    first = next(n for n, i in enumerate(code) if i.op == "send" and i.kwargs["to"] != program.rank)
    name = code[first].reads[0].partition(".")[0]
    return sum(
        any(x.startswith(f"{name}.i@") for x in i.outputs) and i.op != "chunk" for i in code[first:]
    )


@pytest.mark.parametrize(("size", "pieces"), [(2, 2), (2, 4), (4, 2), (2, (1, 4, 3)), (4, (3, 5))])
@pytest.mark.parametrize("work", [halved, normed, added])
def test_values_are_those_of_the_plain_program(work: Work, size: int, pieces: Pieces) -> None:
    """To the bit: each row is computed as before, and no sum is cut."""
    mesh, second = DeviceMesh.arange(tp=size), work is added
    fd = ring(work, mesh, pieces, rows=8 * size, computed=pieces, second=second)
    program = mf.compile(fd, SYMMETRIC)
    plain = mf.compile(ring(work, mesh, pieces, rows=8 * size, second=second), SYMMETRIC)
    verify(program.host)
    for rank in mesh.ranks:
        assert ahead(run_of(program, rank)) == Stream(0, pieces).count - 1
        check_types(program.for_rank(rank).as_run)
        Flow(program.for_rank(rank).as_run, has_frees=True).run()
    draw = torch.Generator().manual_seed(3)
    values = program.fusion.values
    given = [torch.randn(values[x].shape, generator=draw).double() for x in program.fusion.inputs]
    found = mf.simulate(plain, given).outputs
    for schedule in (None, 1, 2):
        check_everywhere(program, given, found, exact=True, schedule=schedule)
    x, z, w = given
    torch.testing.assert_close(found[-1], work(x, z) @ w)


def test_without_its_sync_the_verifier_sees_the_race() -> None:
    program = mf.compile(ring(halved, DeviceMesh.arange(tp=2), 2, computed=2), SYMMETRIC)
    local = run_of(program, 0)
    first = next(n for n, i in enumerate(local.instructions) if i.op == "sync")
    code = tuple(i for n, i in enumerate(local.instructions) if n != first)
    with pytest.raises(mf.ProgramError, match=r"reads %t_1\.j\.piece@3 on stream 1"):
        Flow(replace(local, instructions=code), has_frees=True).run()


@pytest.mark.parametrize("shape", [{"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 3}])
def test_ranks_send_in_one_order(shape: dict[str, int]) -> None:
    """To other ranks all as before; of each piece, the same turn on all ranks."""
    mesh = DeviceMesh.arange(**shape)
    early, late = (
        mf.compile(ring(halved, mesh, 2, rows=24, computed=computed), SYMMETRIC)
        for computed in (2, None)
    )
    turns = set()
    for rank in mesh.ranks:
        new, old = sent(run_of(early, rank)), sent(run_of(late, rank))
        assert [x for x in new if x[0] != rank] == [x for x in old if x[0] != rank]
        assert sorted(new) == sorted(old) and new != old
        turns.add(tuple(to == rank for to, _ in new))
    assert turns == {(False, True, True, *(False,) * (len(new) - 3))}


class TestText(TestCase):
    def test_the_first_piece_is_sent_between_the_two(self) -> None:
        program = mf.compile(ring(halved, DeviceMesh.arange(tp=2), 2, computed=2), SYMMETRIC)
        lines = [line.partition("  #")[0].strip() for line in str(run_of(program, 1)).splitlines()]
        first = next(n for n, line in enumerate(lines) if "memory=symmetric" in line)
        last = next(n for n, line in enumerate(lines) if "matmul" in line)
        self.assertExpectedInline(
            "\n".join(lines[first : last + 1]),
            """\
%t_1: f64[8,6] of [16,6] (tp=S0) = alloc(memory=symmetric)
%x.i@1: f64[4,6] of [16,6] (tp=S0, chunk(0,2,0)) = chunk(%x)
%t_1.i@1: f64[4,6] of [16,6] (tp=S0, chunk(0,2,0)) = chunk(%t_1)
%t_1.i@1 = mul(%x.i@1, 0.5)
set_stream 1
sync %caller
%t_1.j.piece@3: f64[4,6] of [16,6] (tp=S0, chunk(0,2,0)) = chunk(%t_1)
%whole.j@3: f64[4,6] of [16,6] (tp=R, chunk(0,4,0)) = alloc
group_start
%c0@3 = send(%t_1.j.piece@3, to=0)
%c1@3 = recv(%whole.j@3, from=0)
group_end
set_stream %caller
free %x.i@1, %t_1.i@1
%x.i@2: f64[4,6] of [16,6] (tp=S0, chunk(0,2,1)) = chunk(%x)
%t_1.i@2: f64[4,6] of [16,6] (tp=S0, chunk(0,2,1)) = chunk(%t_1)
%t_1.i@2 = mul(%x.i@2, 0.5)
free %x.i@2, %t_1.i@2
%t: f64[16,4] of [16,8] (tp=S1) = alloc
set_stream 0
sync %caller
set_stream 1
sync %caller
%t_1.j.piece@1: f64[4,6] of [16,6] (tp=S0, chunk(0,2,0)) = chunk(%t_1)
set_stream 1
%whole.j@1: f64[4,6] of [16,6] (tp=R, chunk(0,4,2)) = alloc
group_start
%c0@1 = send(%t_1.j.piece@1, to=1)
%c1@1 = recv(%whole.j@1, from=1)
group_end
%t_1.j.piece@2: f64[4,6] of [16,6] (tp=S0, chunk(0,2,1)) = chunk(%t_1)
set_stream 1
%whole.j@2: f64[4,6] of [16,6] (tp=R, chunk(0,4,3)) = alloc
group_start
%c0@2 = send(%t_1.j.piece@2, to=1)
%c1@2 = recv(%whole.j@2, from=1)
group_end
%t.j@1: f64[4,4] of [16,8] (tp=S1, chunk(0,4,2)) = chunk(%t)
set_stream 0
wait %c1@1
%t.j@1 = matmul(%whole.j@1, %w)""",
        )


@pytest.mark.parametrize(
    "fd",
    [
        # the last shard has fewer rows, so that its pieces do
        pytest.param(lambda mesh: ring(halved, mesh, 2, rows=7, computed=2), id="uneven"),
        pytest.param(lambda mesh: ring(halved, mesh, 2), id="computed at once"),
        pytest.param(lambda mesh: ring(halved, mesh, 1, computed=2), id="sent at once"),
        # the first piece of four is there with the first of two, and the last one too
        pytest.param(lambda mesh: ring(halved, mesh, 2, computed=1), id="in one piece"),
        # the buffer that it arrives in is made behind what is computed
        pytest.param(lambda mesh: ring(halved, mesh, 2, computed=2, kept=True), id="kept"),
    ],
)
def test_what_stays(fd: Callable[[DeviceMesh], mf.FusionDefinition]) -> None:
    mesh = DeviceMesh.arange(tp=2)
    program = mf.compile(fd(mesh), SYMMETRIC)
    for rank in mesh.ranks:
        assert next(to == rank for to, _ in sent(run_of(program, rank)))
    draw = torch.Generator().manual_seed(3)
    values = program.fusion.values
    x, z, w = (torch.randn(values[n].shape, generator=draw).double() for n in program.fusion.inputs)
    wanted = [halved(x, z) @ w, halved(x, z)]
    check_everywhere(program, [x, z, w], wanted[: len(program.fusion.outputs)])
