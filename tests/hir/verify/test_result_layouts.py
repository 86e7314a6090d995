"""The verifier of host programs knows which layout each instruction makes of which.

For each contradiction a program that has it; that the program without it is right shows that
nothing else was wrong. What accepted programs compute is in test_check_mutants.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.drawn_rows import drawn_call, of_torch
from helpers.host_checks import accepted, everywhere, full, parse, per_rank, refused
from helpers.mutants import with_attrs
from helpers.programs import program_text
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, hir
from mdfuse.communication import KINDS
from mdfuse.hir.instructions import BUFFER_OPS
from mdfuse.hir.verify import kind_layouts
from mdfuse.hir.verify.buffer_types import RULES
from mdfuse.hir.verify.check import verify
from mdfuse.hir.verify.kind_layouts import transition_problem
from mdfuse.hir.verify.result_layouts import is_alike, result_layout
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Placement, Varies
from mdfuse.reshard import Local, steps, with_type

#: name -> (mesh, a right program, what stands there, what contradicts it, words of the message)
CONTRADICTIONS: dict[str, tuple[str, str, str, str, tuple[str, ...]]] = {
    "a reduce whose result all ranks are to have": (
        "mesh(x=2)",
        "input %p: P; %b: T = alloc; %c = post allreduce[sum](%p) -> %b SUM; wait %c; return %b",
        "allreduce[sum](%p) -> %b f32[4] (x=P(sum)) => (x=R) axis=x",
        "reduce[sum](%p) -> %b f32[4] (x=P(sum)) => (x=R)",
        ("Reduce[sum]: only one rank gets the result", "changes one layout into the other"),
    ),
    "another reduce op than the value has": (
        "mesh(x=2)",
        "input %p: P; %b: T = alloc; %c = post allreduce[sum](%p) -> %b SUM; wait %c; return %b",
        "allreduce[sum]",
        "allreduce[max]",
        ("Allreduce[max] axis=x: (x=P(sum)) is P(sum) along x, not P(max)",),
    ),
    "an all-reduce along another axis": (
        "mesh(x=2, y=2)",
        "input %p: f32[4] (x=P(sum), y=R); %b: f32[4] (x=R, y=R) = alloc; "
        "%c = post allreduce[sum](%p) -> %b f32[4] (x=P(sum), y=R) => (x=R, y=R) axis=x; wait %c; "
        "return %b",
        "axis=x",
        "axis=y",
        ("is R along y, not P(sum)",),
    ),
    "an all-to-all of another axis": (
        "mesh(x=2, y=2)",
        "input %a: f32[2,4] of [4,4] (x=S0, y=R); "
        "%s: f32[8] of [4,4] (x=S0, y=R) flat = pack(%a, dim=0, to_dim=1, axis=x); "
        "%b: f32[4,2] of [4,4] (x=S1, y=R) = alloc; %c = post alltoall(%s) -> %b "
        "f32[4,4] (x=S0, y=R) => (x=S1, y=R) dim=0 to_dim=1 axis=x; wait %c; return %b",
        "to_dim=1 axis=x",
        "to_dim=1 axis=y",
        ("y is not the innermost axis that splits dim 0",),
    ),
    "packed for another exchange": (
        "mesh(x=2)",
        "input %a: f32[2,4] of [4,4] (x=S0); "
        "%s: f32[8] of [4,4] (x=S0) flat = pack(%a, dim=0, to_dim=1, axis=x); "
        "%b: f32[4,2] of [4,4] (x=S1) = alloc; %c = post alltoall(%s) -> %b "
        "f32[4,4] (x=S0) => (x=S1) axis=x dim=0 to_dim=1; wait %c; return %b",
        "pack(%a, dim=0, to_dim=1,",
        "pack(%a, dim=1, to_dim=0,",
        ("it is packed with dim=1, to_dim=0, axis=x",),
    ),
    "a sum over a split dim that is declared whole": (
        "mesh(x=2)",
        "input %x: f32[2,4] of [4,4] (x=S0); %y: f32[4] (x=P(sum)) = sum(%x, dims=[0]); return %y",
        "(x=P(sum))",
        "(x=R)",
        ("declared f32[4] (x=R), but sum of these makes (x=P(sum))",),
    ),
    "a sum that is declared a maximum": (
        "mesh(x=2)",
        "input %x: f32[2,4] of [4,4] (x=S0); %y: f32[4] (x=P(sum)) = sum(%x, dims=[0]); return %y",
        "P(sum)",
        "P(max)",
        ("sum of these makes (x=P(sum))",),
    ),
    "softmax along a split dim": (
        "mesh(x=2)",
        "input %x: f32[2,4] of [4,4] (x=S0); %y: f32[2,4] of [4,4] (x=S0) = softmax(%x, dim=1); "
        "return %y",
        "dim=1",
        "dim=0",
        ("softmax needs dim 0 of operand 0 as a whole, which x splits",),
    ),
    "a set of what is not reduced": (
        "mesh(x=2)",
        "input %x: P; %y: P = set(%x); return %y",
        "%y: P = set",
        "%y: T = set",
        ("declared f32[4] (x=R), but set of these makes (x=P(sum))",),
    ),
    "exp of what is not reduced": (
        "mesh(x=2)",
        "input %x: P; %y: P = neg(%x); return %y",
        "neg",
        "exp",
        ("exp of P(sum) along x is no P(sum)",),
    ),
    "a Partial with one that is not": (
        "mesh(x=2)",
        "input %x: P; input %w: P; %y: P = add(%x, %w); return %y",
        "%w: P",
        "%w: T",
        ("add of P(sum) along x is no P(sum)",),
    ),
    "another chunk": (
        "mesh(x=2)",
        "input %x: T; %y: T = alloc; for %i in 0..2 { %a: CHUNK = chunk(%x); "
        "%b: f32[2] of [4] (x=R, chunk(0,2,%i)) = chunk(%y); %b = add(%a, 1.0); } return %y",
        "chunk(0,2,%i)) = chunk(%y)",
        "chunk(0,2,(%i + 1) mod 2)) = chunk(%y)",
        ("add of these makes (x=R, chunk(0,2,0))", "%b@1: f32[4] (x=R, chunk(0,2,1))"),
    ),
    "a row that each rank chooses": (
        "mesh(x=2)",
        "input %x: M; %y: T = select(%x, dim=0, index=1); return %y",
        "index=1",
        "index=rank",
        ("select of it makes (x=varies)",),
    ),
    "a row of a split dim": (
        "mesh(x=2)",
        "input %x: f32[2,4] of [4,4] (x=S0); %y: V = select(%x, dim=0, index=0); return %y",
        "%y: V",
        "%y: T",
        ("select of it makes (x=varies)",),
    ),
    "a number of the rank": (
        "mesh(x=2)",
        "input %x: T; %y: T = add(%x, 1); return %y",
        "1)",
        "coord(x))",
        ("add of these makes (x=varies)",),
    ),
    "a number that was computed from one of the rank": (
        "mesh(x=2)",
        "input %x: T; %n: i64 scalar = add(1, 2); %y: T = mul(%x, %n); return %y",
        "add(1, 2)",
        "add(rank, 2)",
        ("mul of these makes (x=varies)",),
    ),
    "part of what is to be the same": (
        "mesh(x=2)",
        "input %x: S; %y: V = alloc; %v: f32[2] of [4] (x=R, chunk(0,2,0)) = alloc; "
        "%y = uniform(1, shape=[4], dtype=f32, stream=0); "
        "%r: f32[] (x=varies) = select(%y, dim=0, index=rank); %r = add(%r, 1.0); return %y",
        "%y: V",
        "%y: T",
        ("writes %r, which is varies along x, into %y: f32[4] (x=R)",),
    ),
    "each rank updates another chunk": (
        "mesh(x=2)",
        "input %x: T; alias %y = %x; %y = add(%x, 1.0); for %i in 0..2 { "
        "%b: f32[2] of [4] (x=R, chunk(0,2,(%i + coord(x)) mod 2)) = chunk(%y); "
        "%b = add(%b, 1.0); } return %y",
        "0..2",
        "0..1",
        ("which is another chunk along x, and not every one in turn, into %x: f32[4]",),
    ),
    "two runs of rows, which are a copy": (
        "mesh(x=2)",
        "input %x: T; alias %y = %x; %y = add(%x, 1.0); for %i in 0..2 { "
        "%b: f32[2] of [4] (x=R, chunk(0,2,%i)) = chunk(%y); %b = add(%b, 1.0); } return %y",
        "chunk(0,2,%i)) = chunk(%y)",
        "chunk(S0/zigzag,2,%i)) = chunk(%y) contiguous",
        (
            "writes %b, which is a copy of two runs of rows, into %x: f32[4]",
            "write a chunk of one run: chunk(0,4,i), then another",
        ),
    ),
    "nothing was expanded": (
        "mesh(x=2)",
        "input %x: f32[1,4] (x=R); input %e: M; %u: M = expand(%x, shape=[4,4]); "
        "%y: f32[1,4] (x=R) = unexpand(%u, dims=[0]); return %y",
        "unexpand(%u",
        "unexpand(%e",
        ("no expand made dim 0 of %e",),
    ),
    "what is sent differs, what is received does not": (
        "mesh(x=3)",
        "input %x: f32[2] of [6] (x=S0); %b: f32[2] of [6] (x=S0) = alloc; group_start; "
        "%s = send(%x, to=(coord(x) + 1) mod 3, axis=x); "
        "%r = recv(%b, from=(coord(x) - 1) mod 3, axis=x); group_end; wait %s; wait %r; return %b",
        "%b: f32[2] of [6] (x=S0)",
        "%b: f32[2] (x=R)",
        ("ranks that are to hold the same as %b receive different parts", "vary along the axis"),
    ),
    "a gather of buffers of another mesh": (
        "m0=mesh(x=2), m1=mesh(x=2: 1 0)",
        "input %x: f32[2] of [4] m0(x=S0); %b: f32[4] m0(x=R) = alloc; "
        "%c = post allgather(%x) -> %b f32[4] m0(x=S0) => m0(x=R) axis=x dim=0; wait %c; return %b",
        "%x: f32[2] of [4] m0(x=S0)",
        "%x: f32[2] of [4] m1(x=S0)",
        ("of %x, but it is to be [4] (x=S0)",),
    ),
    "a barrier that is posted": (
        "mesh(x=2)",
        "input %x: T; %b: T = alloc; %b = set(%x); barrier (x=R); return %b",
        "barrier (x=R)",
        "%c = post barrier(%x) -> %b f32[4] (x=R) => (x=R); wait %c",
        ("Barrier: it moves nothing",),
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction(name: str) -> None:
    on, text, old, new, words = CONTRADICTIONS[name]
    good = parse(text, on)
    accepted(good)
    assert full(text).count(full(old)) == 1, full(text)
    bad = hir.parse(f"host @p on {on} {{\n{full(text).replace(full(old), full(new))}\n}}")
    refused(bad, *words)
    ranks = everywhere(bad)
    with pytest.raises(mf.MdfuseError):
        verify(ranks)


# -- ranks that differ ---------------------------------------------------------------------------


def test_ranks_make_alike_what_is_alike() -> None:
    text = "input %x: T; %y: KIND = mul(%x, 2.0); return %y"
    same, other = text.replace("KIND", "T"), text.replace("KIND", "T").replace("2.0", "3.0")
    verify(per_rank(same, same))
    refused(per_rank(same, other), "%y is the same on all ranks along x, by its type", "x=varies")
    vary = [t.replace("%y: T", "%y: V") for t in (same, other)]
    verify(per_rank(*vary))


def test_a_branch_on_the_rank_makes_ranks_differ() -> None:
    text = "input %x: T; %y: T = mul(%x, 1.0); if coord(x) == 0 { %y = neg(%y); } return %y"
    refused(parse(text), "%y is the same on all ranks along x, by its type", "rank 0", "rank 1")
    accepted(parse(text.replace("%y: T", "%y: V")))


def test_peers_along_another_axis() -> None:
    """What is the same along dp is received from the same position everywhere along it."""
    text = (
        "input %x: f32[2] of [4] (dp=R, x=S0); %b: f32[2] of [4] (dp=R, x=S0) = alloc; group_start;"
        " %s = send(%x, to=(coord(x) + SHIFT) mod 2, axis=x); "
        "%r = recv(%b, from=(coord(x) - SHIFT) mod 2, axis=x); group_end; wait %s; wait %r; "
        "return %b"
    )
    accepted(parse(text.replace("SHIFT", "1"), "mesh(dp=2, x=2)"))
    skewed = parse(text.replace("SHIFT", "coord(dp)"), "mesh(dp=2, x=2)")
    refused(skewed, "ranks that are to hold the same as %b receive different parts")
    own = text.replace("%b: f32[2] of [4] (dp=R", "%b: f32[2] of [4] (dp=varies")
    accepted(parse(own.replace("SHIFT", "coord(dp)"), "mesh(dp=2, x=2)"))


def test_what_varies() -> None:
    """Ring-like programs: each rank computes with its own, and a set says what came of it."""
    program = hir.parse(program_text("by_rank/turned"))
    accepted(program)
    rows = [torch.arange(4.0).reshape(2, 2) + 3 * r for r in range(4)]
    w = torch.tensor([[1.0, -1.0], [2.0, 5.0]])
    given: list[dict[str, Any]] = [{"x": x, "w": w} for x in rows]
    mine = [rows[r] @ rows[r - 1].T + w[r % 2] for r in range(4)]
    for schedule in (None, 0, 1, 2):
        found = mf.simulate(program, per_rank=given, schedule=schedule)
        for r, (y, z, following) in enumerate(found.per_rank):
            assert torch.equal(y, sum(mine, torch.zeros(2, 2)))
            assert torch.equal(z, mine[r])
            assert torch.equal(following, rows[r - 1])
        assert torch.equal(found.outputs[1], torch.cat(mine))


def test_a_value_that_varies_has_no_global_value() -> None:
    text = "input %x: T; %y: V = mul(%x, rank); return %y, %x"
    found = mf.simulate(parse(text), per_rank=[{"x": torch.ones(4)}] * 2)
    assert found.outputs[0] is None and torch.equal(found.outputs[1], torch.ones(4))
    assert [rows[0].tolist() for rows in found.per_rank] == [[0.0] * 4, [1.0] * 4]


def test_only_host_programs_vary() -> None:
    mesh = DeviceMesh.arange(x=2)
    with pytest.raises(mf.LayoutError, match="only buffers of host programs may vary"):
        mf.shard_tensor(torch.ones(4), mesh, {"x": Varies()}, rank=0)
    with mf.FusionDefinition("f") as fd, pytest.raises(mf.LayoutError, match="varies"):
        fd.define_tensor([4], mesh=mesh, layout={"x": Varies()})


@pytest.mark.parametrize(
    ("attr", "value"), [("part", (0, 1, 4)), ("part", (2, 4, 4)), ("part", (0, 2, 8))]
)
def test_the_rows_of_a_table(attr: str, value: Any) -> None:
    """A projection says which rows of a split table the rank has."""
    text = "input %n: i64[3] (x=R); input %w: f32[2,4] of [4,4] (x=S0); "
    text += "%y: f32[3,4] (x=P(sum)) = embedding(%n, %w); return %y"
    programs = everywhere(parse(text))
    verify(programs)
    row, end = programs[0].instructions
    assert row.kwargs[attr] == (0, 2, 4)
    code = (with_attrs(row, **{attr: value}), end)
    broken = hir.HostProgram(
        **{
            f: getattr(programs[0], f)
            for f in ("name", "types", "inputs", "outputs", "aliases", "rank")
        },
        instructions=code,
    )
    refused(broken, "rank 0 runs embedding with part=(0, 2, 4), not")


# -- every instruction has a rule ----------------------------------------------------------------


def test_every_kind_has_a_rule() -> None:
    assert kind_layouts._KINDS.keys() == KINDS.keys()
    assert {*BUFFER_OPS} <= RULES.keys()


@pytest.mark.parametrize("fn", TABLE)
def test_every_row_keeps_a_layout(fn: str) -> None:
    """Operands that are whole everywhere give whole results in each row, unless a number varies."""
    shapes, attrs, made = _taken(fn)
    mesh = DeviceMesh.arange(x=2)
    whole = Layout(mesh, {})
    layouts = [whole if s is not None else None for s in shapes]
    absent = [False] * len(shapes)
    for at, shape in enumerate(made):
        for declared in (whole, Layout(mesh, {"x": Varies()})):
            given = fn, attrs, shapes, layouts, made[0], declared
            assert is_alike(result_layout(*given, frozenset(), absent, at), whole, len(shape))
        moving = result_layout(
            fn, attrs, shapes, layouts, made[0], whole, frozenset("x"), absent, at
        )
        assert moving.placements == (Varies(),)


def _taken(fn: str) -> tuple[list[Any], dict[str, Any], tuple[tuple[int, ...], ...]]:
    """Shapes of operands, attributes, and the shapes of the results, of a call that torch takes."""
    draw = random.Random(fn)
    while True:
        operands, attrs = drawn_call(draw, TABLE[fn])
        made = of_torch(TABLE[fn].call, *operands, **attrs)
        if made and made[0]:
            return (
                [tuple(x.shape) if isinstance(x, Tensor) else None for x in operands],
                attrs,
                made,
            )


# -- the table of transitions agrees with what resharding does -----------------------------------

_PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial("sum"))


def test_every_step_of_a_reshard_is_a_transition() -> None:
    mesh = DeviceMesh.arange(dp=2, tp=3)
    layouts = [Layout(mesh, {"dp": a, "tp": b}) for a in _PLACEMENTS for b in _PLACEMENTS]
    for ranks in ([4, 1, 3], [0, 1, 2]):
        line = DeviceMesh(ranks, axes=("x",))
        layouts += [Layout(line, {"x": p}) for p in (Replicate(), Shard(0), Partial("sum"))]
    layouts.append(Layout(DeviceMesh([5], axes=("y",)), {}))
    shape, seen = (12, 6), set()
    for before in layouts:
        for after in layouts:
            try:
                path = steps(before, after, shape)
            except mf.LayoutError:
                continue
            for step in path:
                if isinstance(step, Local):
                    continue
                comm = with_type(step, shape, torch.float32)
                assert not isinstance(comm, Local)
                assert transition_problem(comm) is None, comm
                seen.add(comm.kind)
    assert seen >= {
        "Allgather", "AllToAll", "Allreduce", "ReduceScatter", "Broadcast", "Reduce", "Gather",
        "Scatter", "SendRecv", "Exchange",
    }  # fmt: skip
