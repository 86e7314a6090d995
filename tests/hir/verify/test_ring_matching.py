"""Rings are verified once for all ranks and iterations; the verdict is that of all written out."""

from __future__ import annotations

import random

import pytest
from helpers.programs import program_text
from helpers.ring_programs import TEMPLATES, broken, ring, verdict
from helpers.stream_cases import CASES

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.check import verify
from mdfuse.hir.verify.loop_summary import folded
from mdfuse.hir.verify.ring_matching import rotates


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", TEMPLATES)
def test_drawn_rings_are_accepted(name: str, seed: int) -> None:
    program = ring(name, seed)
    verify(program)
    verify(program, in_full=True)
    assert rotates(program) is (name != "local")


@pytest.mark.parametrize("name", TEMPLATES)
def test_broken_rings_have_the_verdict_of_all_written_out(name: str) -> None:
    verdicts = set()
    for seed in range(80):
        draw, program = random.Random(seed), ring(name, seed)
        for _ in range(draw.choice((1, 1, 2))):
            program = broken(program, draw)
        verdicts.add(verdict(program, True))
        assert verdict(program, False) == verdict(program, True), f"seed {seed}\n{program}"
    assert {"", "ProgramError"} <= verdicts


RING = program_text("ring_matching/ring")

#: what is wrong -> (what is written, what stands there instead)
FAULTS = {
    "another shift of the send": ("to=(coord(tp) - %i)", "to=(coord(tp) + %i)"),
    "another shift of the recv": ("from=(coord(tp) + %i)", "from=(coord(tp) - %i)"),
    "one hop more": ("to=(coord(tp) - %i) mod 5", "to=(coord(tp) - %i - 1) mod 5"),
    "one hop more on arrival": ("from=(coord(tp) + %i) mod 5", "from=(coord(tp) + %i + 1) mod 5"),
    "one hop more on both sides": (
        "to=(coord(tp) - %i) mod 5, axis=tp)\n    %c1 = recv(%p.i, from=(coord(tp) + %i) mod 5",
        "to=(coord(tp) - %i - 1) mod 5, axis=tp)\n"
        "    %c1 = recv(%p.i, from=(coord(tp) + %i + 1) mod 5",
    ),
    "another rank": ("from=(coord(tp) + %i) mod 5", "from=0"),
    "beyond the axis": ("from=(coord(tp) + %i) mod 5", "from=coord(tp) + %i"),
    "modulo another number": ("from=(coord(tp) + %i) mod 5", "from=(coord(tp) + %i) mod 4"),
    "another chunk arrives": (
        "%p.i: f32[2] of [9] (tp=R, chunk(0,5,(%i + coord(tp)) mod 5)) = alloc",
        "%p.i: f32[2] of [9] (tp=R, chunk(0,5,(%i + coord(tp) + 1) mod 5)) = alloc",
    ),
    "another chunk is written": (
        "%y.i: f32[2] of [9] (tp=R, chunk(0,5,(%i + coord(tp)) mod 5))",
        "%y.i: f32[2] of [9] (tp=R, chunk(0,5,(%i - coord(tp)) mod 5))",
    ),
    "one iteration less": ("0..5 {", "0..4 {"),
    "one iteration more": ("0..5 {", "0..6 {"),
    "a chunk is left out": ("    %y.i = neg", "    if %i < 4 {\n    %y.i = neg"),
    "nothing waits for the send": ("    wait %c0\n", ""),
    "nothing waits for what arrives": ("    wait %c1\n", ""),
    "read before it is there": (
        "    wait %c1\n    %y.i:",
        "    %q.i: f32[2] of [9] (tp=R, chunk(0,5,(%i + coord(tp)) mod 5)) = neg(%p.i)\n"
        "    free %q.i\n    wait %c1\n    %y.i:",
    ),
    "no group: the recv comes first": (
        "    group_start\n    %c0 = send(%x, to=(coord(tp) - %i) mod 5, axis=tp)\n"
        "    %c1 = recv(%p.i, from=(coord(tp) + %i) mod 5, axis=tp)\n    group_end\n    wait %c0\n",
        "    %c1 = recv(%p.i, from=(coord(tp) + %i) mod 5, axis=tp)\n    wait %c1\n"
        "    %c0 = send(%x, to=(coord(tp) - %i) mod 5, axis=tp)\n    wait %c0\n",
    ),
    "the send is missing": (
        "    %c0 = send(%x, to=(coord(tp) - %i) mod 5, axis=tp)\n", ""
    ),
    "freed while it is on its way": ("    wait %c1\n", "    free %p.i\n    wait %c1\n"),
}  # fmt: skip


def without(name: str) -> str:
    """The ring with a fault; a block that it opens is closed."""
    old, new = FAULTS[name]
    assert RING.count(old) == 1 or name.startswith("nothing"), name
    text = RING.replace(old, new, 1)
    if "if %i" in new:
        text = text.replace("neg(%p.i)\n", "neg(%p.i)\n    }\n")
    if name.startswith("no group"):
        text = text.replace("    wait %c0\n    wait %c1\n", "    wait %c0\n")
    if name == "the send is missing":
        text = text.replace("    wait %c0\n", "")
    return text


def test_the_ring_is_right() -> None:
    program = hir.parse(RING)
    verify(program)
    assert rotates(program)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_ring_is_found(name: str) -> None:
    program = hir.parse(without(name))
    with pytest.raises(mf.MdfuseError) as full:
        verify(program, in_full=True)
    with pytest.raises(mf.MdfuseError) as short:
        verify(program)
    assert type(short.value) is type(full.value)


def test_transfers_along_another_axis_of_the_mesh_are_found() -> None:
    text = RING.replace("mesh(tp=5)", "mesh(dp=5, tp=5)").replace("(tp=", "(dp=R, tp=")
    verify(hir.parse(text))
    for side in ("to=(coord(tp) - %i) mod 5, axis=", "from=(coord(tp) + %i) mod 5, axis="):
        other = side.replace("coord(tp)", "coord(dp)")
        with pytest.raises(mf.MdfuseError):
            verify(hir.parse(text.replace(side + "tp", other + "dp")))


@pytest.mark.parametrize("in_full", [False, True])
def test_rings_along_two_axes(in_full: bool) -> None:
    """A rank sends to itself along either."""
    mesh = DeviceMesh.arange(dp=3, tp=4)
    with mf.FusionDefinition("two") as fd:
        for axis, n in (("dp", 3), ("tp", 4)):
            x = fd.define_tensor([11, 2], mesh=mesh, layout={axis: Shard(0)})
            fd.add_output(fd.ops.set(x).on(mesh, stream=Stream(0, n, rotate=axis)))
    program = mf.compile(fd, mf.Options(verify=False)).host
    verify(program, in_full)
    assert rotates(program)


@pytest.mark.parametrize("in_full", [False, True])
def test_what_differs_beside_the_ring_is_found_in_one_of_two_rings(in_full: bool) -> None:
    text = RING.replace("mesh(tp=5)", "mesh(dp=5, tp=5)").replace("(tp=", "(dp=R, tp=")
    along_dp = RING.replace("(tp=", "(dp=").replace("(tp)", "(dp)").replace("=tp", "=dp")
    body = along_dp.replace("(dp=", "(tp=R, dp=").replace("%", "%o").strip().splitlines()
    lines = text.strip().splitlines()
    both = "\n".join([*lines[:2], body[1], *lines[2:-2], *body[2:-2], "  return %y, %oy", "}"])
    verify(hir.parse(both), in_full)
    for old, new in (
        ("%x: f32[2] of [9] (dp=R", "%x: f32[2] of [9] (dp=varies"),
        ("%ox: f32[2] of [9] (tp=R", "%ox: f32[2] of [9] (tp=varies"),
    ):
        assert old in both
        with pytest.raises(mf.CommunicationError, match=r"not the same along|different parts"):
            verify(hir.parse(both.replace(old, new)), in_full)


# -- how much is looked at -----------------------------------------------------------------------


def gather(n: int, rows: int) -> hir.HostProgram:
    mesh = DeviceMesh.arange(tp=n)
    with mf.FusionDefinition("gather") as fd:
        x = fd.define_tensor([rows, 4], mesh=mesh, layout={"tp": Shard(0)})
        w = fd.define_tensor([4, 4], mesh=mesh)
        chunks = Stream(0, n, rotate="tp")
        h = fd.ops.matmul(fd.ops.set(x).on(mesh, stream=chunks), w).on(mesh, stream=chunks)
        fd.add_output(h)
    return mf.compile(fd, mf.Options(verify=False)).host


@pytest.mark.parametrize("rows", [2, 2 * 512, 2 * 512 + 1])
def test_the_number_of_ranks_does_not_count(rows: int) -> None:
    program = gather(512, rows)
    verify(program)
    assert rotates(program)
    for rank in (0, 300, 511):
        mine = project(program, rank)
        found = folded(mine)
        assert found is not None and len(found.instructions) < 200
        assert len(written_out(mine).instructions) > 5000


def test_8192_ranks() -> None:
    verify(gather(8192, 3 * 8192 + 5))


def test_a_loop_whose_iterations_differ_is_written_out() -> None:
    text = RING.replace("    group_start\n", "    set_stream %i\n    group_start\n")
    mine = project(hir.parse(text), 0)
    found = folded(mine)
    assert found is not None
    assert len(found.instructions) == len(written_out(mine).instructions)


@pytest.mark.parametrize("name", ["gather_matmul_in_a_ring", "matmul_scatter_in_a_ring"])
def test_streamed_sets_are_rotations(name: str) -> None:
    program = CASES[name].compile().host
    assert rotates(program)
    verify(program)
