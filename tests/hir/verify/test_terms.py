"""Ranks that send each other terms of a sum: each term is there once, or the program is refused."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers.ring_programs import broken
from helpers.stream_cases import CASES
from helpers.term_rings import rings, wrong

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream, hir
from mdfuse.hir import HostProgram
from mdfuse.hir.rank import unrolled
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.hir.verify.check import verify
from mdfuse.hir.verify.terms_of_ranks import check_terms

NAMES = [*rings(3, 6)]


def told(program: HostProgram, in_full: bool = False) -> str:
    """What the verifier says of a program; nothing where it is accepted."""
    try:
        verify(program, in_full)
    except mf.MdfuseError as error:
        return str(error)
    return ""


def by_rank(program: HostProgram) -> str:
    """What it says of the programs of all ranks."""
    try:
        verify({rank: project(program, rank) for rank in program.meshes[0].ranks})
    except mf.MdfuseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_ring_is_right(name: str, n: int) -> None:
    for rows in (2 * n, 2 * n - 1) if name != "two axes" else (2 * n,):
        ring = rings(n, rows)[name]
        assert told(ring.program) == told(ring.program, in_full=True) == ""
        assert by_rank(ring.program) == ""
        assert wrong(ring.program, ring.op) is None


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "two axes"])
def test_more_ranks_than_rows(name: str, rows: int) -> None:
    """Chunks without rows lie in one place of a buffer; those of other ranks have some."""
    ring = rings(4, rows)[name]
    assert told(ring.program) == told(ring.program, in_full=True) == by_rank(ring.program) == ""
    assert wrong(ring.program, ring.op) is None
    short = hir.parse(ring.text.replace("in 0..4 {", "in 0..3 {"))
    assert (short == ring.program) == (told(short) == "") == (by_rank(short) == "")


#: what is wrong -> (the ring, what is written, what stands there instead)
FAULTS = {
    "a term is missing": ("scatter", "in 0..4 {", "in 0..3 {"),
    "the first term is missing": ("scatter", "in 0..4 {", "in 1..4 {"),
    "a term comes twice": ("scatter", "in 0..4 {", "in 0..5 {"),
    "all terms come twice": ("scatter", "in 0..4 {", "in 0..8 {"),
    "every second one": ("scatter", "in 0..4 {", "in 0..4 step 2 {"),
    "the last one alone": ("scatter", "add(%y, %r.i)", "set(%r.i)"),
    "one is added twice": ("scatter", "add(%y, %r.i)", "add(%r.i, %r.i)"),
    "joined by another op": ("scatter", "add(%y, %r.i)", "maximum(%y, %r.i)"),
    "subtracted": ("scatter", "add(%y, %r.i)", "sub(%y, %r.i)"),
    "begins anew": ("scatter", "if %i == 0", "if %i < 2"),
    "an op of a term": ("scatter", "= set(%r.i)", "= exp(%r.i)"),
    "a number is added to terms of a product": ("prod", "mul(%y, %r.i)", "add(%y, %r.i)"),
    "terms of an average": ("scatter", "P(sum)", "P(avg)"),
    "terms of a maximum are added": ("max", "maximum(%y", "add(%y"),
    "terms of a minimum are multiplied": ("min", "minimum(%y", "mul(%y"),
    "a term of a product is missing": ("prod", "in 0..4 {", "in 0..3 {"),
    "one less in a grid": ("in a grid", "in 0..4 {", "in 0..3 {"),
    "one more by turns": ("by turns", "in 0..4 {", "in 0..5 {"),
    "one less by turns": ("by turns", "in 0..4 {", "in 0..3 {"),
    "nothing is added by turns": ("by turns", "= add(%y, %r.i)", "= set(%r.i)"),
    "the same term side by side": (
        "side by side",
        "(coord(tp) + %i) mod 4)) = chunk(%x)",
        "(coord(tp) + 1) mod 4)) = chunk(%x)",
    ),
    "the mean of terms": ("side by side", "= sum(%all", "= mean(%all"),
    "the largest of terms": ("side by side", "= sum(%all", "= max(%all"),
    "one of the terms": ("side by side", "= sum(%all, dims=[0])", "= select(%all, dim=0, index=0)"),
    "a sum without one's own term": (
        "neighbour",
        "  %own = set(%xc)\n",
        "  %own = mul(%xc, 0.5)\n",
    ),
    "a step without a term": ("neighbour", "= add(%r2, %x2)", "= set(%r2)"),
    "a term twice in a step": ("neighbour", "= add(%r2, %x2)", "= add(%x2, %x2)"),
    "a step in place without a term": ("in place", "= add(%a2, %r2)", "= set(%r2)"),
    "a step in place with a term twice": ("in place", "= add(%a2, %r2)", "= add(%r2, %r2)"),
    "one's own term alone": ("neighbour", "  %y = add(%y, %r)\n", ""),
    "the sum of all others alone": ("neighbour", "%y = add(%y, %r)", "%y = set(%r)"),
    "along one axis alone": ("two axes", "in 0..2 {", "in 0..1 {"),
    "along the other axis alone": ("two axes", "in 0..4 {", "in 0..1 {"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused(name: str) -> None:
    which, old, new = FAULTS[name]
    ring = rings(4, 8)[which]
    assert old in ring.text
    program = hir.parse(ring.text.replace(old, new))
    if name == "the same term side by side":
        program = hir.parse(
            re.sub(r"(coord\(tp\) [+-] )%i( mod 4\)?, axis)", r"\g<1>1\2", str(program))
        )
    if name == "a sum without one's own term":  # what is scaled is a term all the same
        assert told(program) == by_rank(program) == ""
        return
    assert told(program) and told(program, in_full=True) and by_rank(program)
    assert wrong(program, "avg" if "average" in name else ring.op) is not None


def test_the_error_names_the_ranks() -> None:
    text = rings(4, 8)["scatter"].text
    found = told(hir.parse(text.replace("in 0..4 {", "in 0..2 {")))
    assert "return uses %y, which has no terms of ranks 1, 2" in found
    found = told(hir.parse(text.replace("in 0..4 {", "in 0..5 {")))
    assert "add -> y adds the term of rank 0 to %y, which has it" in found
    found = told(hir.parse(text.replace("add(%y, %r.i)", "sub(%y, %r.i)")))
    assert "sub -> y uses %y, which has no terms of ranks 1, 2, 3" in found


def test_what_varies_claims_nothing() -> None:
    text = (
        rings(4, 8)["scatter"]
        .text.replace("in 0..4 {", "in 0..3 {")
        .replace("%p.i, to", "%v.i, to")
    )
    text = re.sub(
        r"%([yr.i]+): f32\[2,3\] of \[8,3\] \(tp=S0\)", r"%\1: f32[2,3] (tp=varies)", text
    )
    cast = "chunk(%x)\n    %v.i: f32[2,3] (tp=varies) = set(%p.i)"
    text = text.replace("chunk(%x)", cast).replace("free %p.i", "free %p.i, %v.i")
    assert told(hir.parse(text)) == told(hir.parse(text), True) == ""
    said = "  %z: f32[2,3] of [8,3] (tp=S0) = set(%y)\n  free %y\n  return %z"
    assert told(hir.parse(text.replace("  return %y", said))) == ""  # on the author's word


def test_a_whole_that_arrives_as_a_term() -> None:
    text = """
host @whole on mesh(tp=2) {
  input %x: f32[2] (tp=R)
  %p: f32[2] (tp=P(sum)) = alloc
  group_start
  %s = send(%x, to=(coord(tp) + 1) mod 2, axis=tp)
  %r = recv(%p, from=(coord(tp) + 1) mod 2, axis=tp)
  group_end
  wait %s
  wait %r
  %y: f32[2] (tp=R) = alloc
  %c = post allreduce[sum](%p) -> %y f32[2] (tp=P(sum)) => (tp=R) axis=tp
  wait %c
  return %y
}"""
    assert "%p, which has more" in told(hir.parse(text)).replace("uses ", "")
    assert by_rank(hir.parse(text))
    assert told(hir.parse(text.replace("sum", "max"))) == ""


def test_a_term_that_one_rank_has_twice() -> None:
    """Rank 1 has the term of rank 0, which keeps it; that of rank 1 is gone."""
    text = """
host @lost on mesh(tp=2) {
  input %x: f32[2] (tp=P(sum))
  %p: f32[2] (tp=P(sum)) = neg(%x)
  if rank == 0 {
    %s = send(%x, to=1)
    wait %s
  } else {
    %r = recv(%p, from=0)
    wait %r
  }
  return %p
}"""
    assert "%p a term that two ranks have" in told(hir.parse(text))


# -- one rank stands for all ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 8192])
@pytest.mark.parametrize("name", ["scatter", "in a grid", "by turns", "max"])
def test_many_ranks(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written out: not the iterations, nor the ranks."""
    text = rings(n, 2 * n)[name].text
    program = hir.parse(text)
    monkeypatch.setattr(unrolled, "WRITTEN_OUT", None)
    verify(program)
    for stop in (n - 1, n + 1) if name != "max" else (n - 1,):  # twice is no more than once
        short = hir.parse(text.replace(f"in 0..{n} {{", f"in 0..{stop} {{"))
        with pytest.raises(TypeError):  # now it would be
            verify(short)


@pytest.mark.parametrize("n", [8, 512])
def test_rings_one_behind_the_other(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a ring scatters, the next one gathers, in several layers."""
    mesh, turn = DeviceMesh.arange(tp=n), Stream(0, n, rotate="tp")
    with mf.FusionDefinition("layers") as fd:
        x = fd.define_tensor([2 * n, 4], torch.float32, mesh, {"tp": Shard(0)})
        for _ in range(4):
            w1 = fd.define_tensor([4, n], torch.float32, mesh, {"tp": Shard(1)})
            w2 = fd.define_tensor([n, 4], torch.float32, mesh, {"tp": Shard(0)})
            h = fd.ops.matmul(fd.ops.set(x).on(mesh, stream=turn), w1)
            h = fd.ops.relu(h.on(mesh, {"tp": Shard(1)}, stream=turn))
            x = fd.ops.matmul(h, w2).on(mesh, {"tp": Shard(0)}, stream=turn)
        fd.add_output(x)
    program = mf.compile(fd, mf.Options(verify=False)).host
    monkeypatch.setattr(unrolled, "WRITTEN_OUT", None)
    verify(program)


@pytest.mark.parametrize("step", [3, 5])
def test_steps_of_several_ranks(step: int) -> None:
    """Every rank is met where the step has no divisor in common with their number."""
    for n in (4, 8, 9):
        text = rings(n, 2 * n)["scatter"].text
        program = hir.parse(re.sub(r"(coord\(tp\) [+-] )%i", rf"\1(%i * {step})", text))
        is_right = n % step != 0
        assert (told(program) == "") == (told(program, True) == "") == is_right
        assert (wrong(program) is None) == is_right


@pytest.mark.parametrize("more", [-1, 0, 1, 4])
def test_layers_that_hand_terms_on(more: int) -> None:
    """Two layers do not stand for all: sums that go round have one term more in each."""
    n = 6
    text = rings(n, 2 * n)["neighbour"].text
    last = n - 1
    steps = text[text.index(f"  %r{last}:") : text.index("  %r: f32")]
    if more < 0:
        text = text.replace(steps, "").replace(f"%a{last}", f"%a{last - 1}")
    added = ""
    for k in range(n, n + more):
        added += (
            steps.replace(f"%a{last - 1}", f"%a{k - 1}!")
            .replace(f"{last}", f"{k}")
            .replace("!", "")
        )
    if more > 0:
        text = text.replace(steps, steps + added)
        tail = text.index("  %r: f32")
        text = text[:tail] + text[tail:].replace(f"%a{last}", f"%a{n + more - 1}")
    program = hir.parse(text)
    assert (told(program) == "") == (told(program, True) == "") == (more == 0)


# -- what the compiler makes ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "pieces"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 2), (8, 1)])
def test_scattered_products(n: int, pieces: int, dtype: torch.dtype) -> None:
    """What is verified, and what ranks run: with products that are added where the sum is."""
    mesh = DeviceMesh.arange(tp=n)
    with mf.FusionDefinition("ring") as fd:
        x = fd.define_tensor([8 * n, 4 * n], dtype, mesh, {"tp": Shard(1)})
        w = fd.define_tensor([4 * n, 6], dtype, mesh, {"tp": Shard(0)})
        y = (x @ w).on(mesh, {"tp": Shard(0)}, stream=Stream(0, n * pieces, rotate="tp"))
        fd.add_output(y)
    program = mf.compile(fd, mf.Options(verify=False)).host
    assert told(program) == told(program, True) == by_rank(program) == ""
    runs = {rank: as_run(project(program, rank)) for rank in range(n)}
    check_terms(runs)
    dropped = {rank: _without_last_sum(p) for rank, p in runs.items()}
    with pytest.raises(mf.ProgramError):
        check_terms(dropped)


def _without_last_sum(program: HostProgram) -> HostProgram:
    """What a rank runs without the last addition, whose terms are lacking then."""
    code = program.instructions
    adds = [n for n, i in enumerate(code) if i.op == "addmm" or i.fn == "add"]
    if adds:
        return replace(program, instructions=(*code[: adds[-1]], *code[adds[-1] + 1 :]))
    (at,) = (n for n, i in enumerate(code) if i.fn == "sum")
    return replace(program, instructions=(*code[:at], replace(code[at], fn="max"), *code[at + 1 :]))


@pytest.mark.parametrize("name", [n for n in CASES if "ring" in n or "scatter" in n])
def test_streamed_programs(name: str) -> None:
    case = CASES[name]
    for rows in (8,) if case.fixed else (8, 7, 3, 0):
        program = case.compile(n=4, rows=rows).host
        assert told(program) == told(program, True) == "", f"{rows} rows"


# -- whatever is changed -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != "scaled"])
def test_what_is_accepted_is_right(name: str) -> None:
    """Programs with one or two changes for all ranks, by whole tensors, in some orders."""
    counts: Counter[str] = Counter()
    for seed in range(60):
        draw = random.Random(f"{name} {seed}")
        n = draw.choice((2, 3, 4))
        ring = rings(n, 2 * n)[name]
        program = ring.program
        for _ in range(draw.choice((1, 1, 2))):
            program = broken(program, draw)
        if any(k.layout is not None and k.layout.varying_axes for k in program.types.values()):
            continue  # nothing is promised
        if program.types["x"] != ring.program.types["x"]:
            continue  # it takes something else
        verdicts = told(program) == "", told(program, True) == ""
        assert verdicts[0] == verdicts[1], f"seed {seed}\n{program}"
        counts["accepted" if verdicts[0] else "refused"] += 1
        if verdicts[0]:
            found = [wrong(program, ring.op, schedule) for schedule in (None, 0, 1)]
            assert found == [None] * 3, f"seed {seed}: {found}\n{program}"
    assert counts["refused"] > 10
