"""Broken programs of counted rows: each is caught, or no different.

The numbers of a fetch say how many rows there are, and decide nothing else.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from helpers import sampling
from helpers.mutants import mutants
from helpers.type_mutants import OP, type_mutants
from torch import Tensor

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.check import verify

#: Two values, with counts of the same type: each may be taken for the other.
TEXT = """host @two on mesh(ep=2) {
  input %x: f32[1,5,2] of [2,5,2] (ep=S0)
  input %z: f32[1,5,2] of [2,5,2] (ep=S0)
  input %n: i64[1,3] of [2,3] (ep=S0)
  input %m: i64[1,3] of [2,3] (ep=S0)
  %n.all: i64[2,3] (ep=R) = alloc
  %a = post allgather(%n) -> %n.all i64[2,3] (ep=S0) => (ep=R) axis=ep dim=0
  wait %a
  %m.all: i64[2,3] (ep=R) = alloc
  %b = post allgather(%m) -> %m.all i64[2,3] (ep=S0) => (ep=R) axis=ep dim=0
  wait %b
  %c: i64[2,3] (ep=R) = fetch(%n.all, most=5)
  %d: i64[2,3] (ep=R) = fetch(%m.all, most=5)
  free %n.all, %m.all
  %xs: f32[<=5:%c,2] of [2,3,5,2] (ep=S0) = pack_rows(%x, %c)
  %zs: f32[<=5:%d,2] of [2,3,5,2] (ep=S0) = pack_rows(%z, %d)
  %xr: f32[<=10:%c,2] of [2,3,5,2] (ep=S1) = alloc(%c)
  %h = post alltoall(%xs) -> %xr f32[2,3,5,2] (ep=S0) => (ep=S1) axis=ep dim=0 to_dim=1 counts=%c
  %zr: f32[<=10:%d,2] of [2,3,5,2] (ep=S1) = alloc(%d)
  %i = post alltoall(%zs) -> %zr f32[2,3,5,2] (ep=S0) => (ep=S1) axis=ep dim=0 to_dim=1 counts=%d
  wait %h
  free %xs
  %xq: f32[<=10:%c,2] of [2,3,5,2] (ep=S1) = neg(%xr)
  free %xr
  %xb: f32[<=5:%c,2] of [2,3,5,2] (ep=S0) = alloc(%c)
  %j = post alltoall(%xq) -> %xb f32[2,3,5,2] (ep=S1) => (ep=S0) axis=ep dim=1 to_dim=0 counts=%c
  wait %i
  free %zs
  %zb: f32[<=5:%d,2] of [2,3,5,2] (ep=S0) = alloc(%d)
  %k = post alltoall(%zr) -> %zb f32[2,3,5,2] (ep=S1) => (ep=S0) axis=ep dim=1 to_dim=0 counts=%d
  wait %j
  free %xq
  %u: f32[1,5,2] of [2,5,2] (ep=S0) = unpack_rows(%xb, %c)
  wait %k
  free %zr
  %v: f32[1,5,2] of [2,5,2] (ep=S0) = unpack_rows(%zb, %d)
  free %xb, %zb, %c, %d
  return %u, %v
}"""

ORDERS = (None, 0, 1, 2, 3)
POISON = mf.Options(poison=True)
OFF = mf.Options(poison=True, verify=False)


@cache
def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x, z = (torch.randn(2, 5, 2, generator=generator) for _ in "xz")
    return x, z, torch.tensor([[4, 0, 1], [0, 2, 1]]), torch.tensor([[0, 1, 1], [2, 3, 0]])


def rows() -> list[dict[str, Tensor]]:
    named = dict(zip("xznm", inputs(), strict=True))
    return [{n: x[r : r + 1].clone() for n, x in named.items()} for r in range(2)]


def outputs(program: HostProgram | list[HostProgram], schedule: int | None) -> list[Tensor]:
    options = POISON if isinstance(program, HostProgram) else OFF
    done = mf.simulate(program, per_rank=rows(), options=options, schedule=schedule)
    return [x for row in done.per_rank for x in row]


@cache
def wanted() -> list[Tensor]:
    x, z, n, m = inputs()
    u, v = (
        torch.where((torch.arange(5) < k.sum(1, keepdim=True))[..., None], y, torch.zeros(()))
        for y, k in ((-x, n), (z, m))
    )
    return [u[:1], v[:1], u[1:], v[1:]]


def difference(program: HostProgram | list[HostProgram]) -> str | None:
    """How a run differs from that of the right program, in some order; None: it does not."""
    for schedule in ORDERS:
        try:
            got = outputs(program, schedule)
        except Exception as error:
            return f"schedule {schedule}: {type(error).__name__} {error}"
        if not all(map(torch.equal, got, wanted())):
            return f"schedule {schedule}: other outputs"
    return None


def test_the_program_is_right() -> None:
    assert difference(hir.parse(TEXT)) is None


# -- by hand -------------------------------------------------------------------------------------


def without_fetch() -> str:
    """The same program where each rank reads the counts in its memory."""
    lines = [x for x in TEXT.splitlines() if "fetch" not in x and "free %n.all" not in x]
    text = "\n".join(lines).replace("%c,", "%n.all,").replace("%c", "%n.all")
    return text.replace("%d", "%m.all")


def texts(text: str, one: str, other: str) -> Iterator[tuple[str, str]]:
    """The text with one word changed, one line left out, or one line elsewhere."""

    def changed(at: re.Match[str], word: str) -> tuple[str, str]:
        return f"{word} at {at.start()}", text[: at.start()] + word + text[at.end() :]

    words = {rf"{one}\b": (other,), rf"{other}\b": (one,), "most=5": ("most=4", "most=6")}
    words["dim=0 to_dim=1"] = ("dim=1 to_dim=0",)
    for word, others in words.items():
        yield from (changed(at, x) for at in re.finditer(word, text) for x in others)
    for by in (f" counts={one}", f" counts={other}"):
        yield f"no{by}", text.replace(by, "", 1)
        yield f"{by} everywhere", re.sub(r" counts=%[\w.]+", by, text)
    lines = text.splitlines()
    for n in range(5, len(lines) - 2):
        left = [*lines[:n], *lines[n + 1 :]]
        yield f"without {lines[n]}", "\n".join(left)
        for to in (n + 1, n + 2, n + 5):
            if to < len(lines) - 2:
                yield f"{lines[n]} at {to}", "\n".join((*left[:to], lines[n], *left[to:]))


@pytest.mark.parametrize("is_fetched", [True, False])
def test_every_text_broken_by_hand_is_caught(is_fetched: bool) -> None:
    text, names = (TEXT, ("%c", "%d")) if is_fetched else (without_fetch(), ("%n.all", "%m.all"))
    assert difference(hir.parse(text)) is None
    verdicts, missed = Counter[str](), []
    every = [*texts(text, *names)]
    for what, broken in random.Random(0).sample(every, sampling.of(len(every), 60)):
        try:
            program = hir.parse(broken)
            verify(program)
        except mf.MdfuseError:
            verdicts["caught"] += 1
            continue
        verdicts["accepted"] += 1
        problem = difference(program)
        if problem is not None and "of which there may be" not in problem:
            missed.append(f"{what}: {problem}")
    assert missed == []
    assert verdicts["caught"] > verdicts["accepted"]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_broken_rank_is_caught(rank: int) -> None:
    ranks = [project(hir.parse(TEXT), r) for r in range(2)]
    broken = [m.program for m in mutants(ranks[rank])]
    changes = type_mutants(ranks[rank])  # another op computes something else, and is right
    broken += [p for what, p in changes if not what.startswith(OP) or "fetch" in what]
    missed = []
    for program in random.Random(rank).sample(broken, sampling.of(len(broken), 60)):
        both = [program if r == rank else p for r, p in enumerate(ranks)]
        try:
            verify(dict(enumerate(both)))
        except mf.MdfuseError:
            continue
        problem = difference(both)
        if problem is not None:
            missed.append(f"{problem}\n{program}")
    assert missed == []


# -- what is said --------------------------------------------------------------------------------

WRONG = [
    ("counts=%c", "counts=%d", "by %d"),
    ("fetch(%n.all, most=5)", "fetch(%n.all, most=6)", "a part may have 6 rows by its fetch"),
    ("fetch(%n.all, most=5)", "fetch(%n.all)", "fetch without most="),
    ("alloc(%c)", "alloc", "alloc of no operands"),
    (" counts=%c", "", "post of 2 operands"),
    ("neg(%xr)", "softmax(%xr, dim=3)", "softmax does not work on rows that are counted"),
    ("neg(%xr)", "add(%xr, %zr)", "add of rows by %c and %d"),
    ("neg(%xr)", "add(%xr, extent(%xr,0))", "known only in a run"),
    ("return %u, %v", "return %u, %xb", "an input, an output or an alias"),
    (
        "free %n.all, %m.all",
        "%e: i64[2,3] (ep=R) = neg(%c)\n  free %n.all, %m.all, %e",
        "neg takes %c",
    ),
    ("(ep=R) = fetch(%n.all, most=5)", "(ep=S0) = fetch(%n, most=5)", "line"),
]


@pytest.mark.parametrize(("old", "new", "what"), WRONG, ids=[new or old for old, new, _ in WRONG])
def test_what_is_said(old: str, new: str, what: str) -> None:
    assert old in TEXT
    with pytest.raises(mf.ProgramError) as caught:
        verify(hir.parse(TEXT.replace(old, new, 1)))
    assert what in str(caught.value) and caught.value.because


def test_rows_by_no_value_are_refused() -> None:
    """Counts, or numbers of experts, may be written as no name in a text."""
    text = """host @none on mesh(x=2) {
  input %x: f32[2,2] (x=R)
  %y: f64[1,3] of [1,6] (x=S1) = line_up_rows(%x, %x, None, capacity=2)
  return %x
}"""
    with pytest.raises(mf.ProgramError, match="line_up_rows of an operand that is no value"):
        verify(hir.parse(text))


def test_what_only_one_rank_holds_is_not_fetched() -> None:
    text = TEXT.replace(
        "%c: i64[2,3] (ep=R) = fetch(%n.all, most=5)",
        "%c: i64[1,3] of [2,3] (ep=S0) = fetch(%n, most=5)",
    )
    with pytest.raises(mf.ProgramError, match=r"it is \(ep=S1\), and of %c ranks hold \(ep=S0\)"):
        verify(hir.parse(text))


#: A rank's part of counts, their layout -> why that does not do for rows that move along ep.
HELD = {
    ("[1,4] of [4,4]", "dp=S0, ep=S0"): r"ranks hold \(dp=S0, ep=S0\): gather that before",
    ("[2,4] of [4,4]", "dp=R, ep=S0"): r"ranks hold \(dp=R, ep=S0\): gather that before",
    ("[2,2] of [4,4]", "dp=S0, ep=S1"): "ranks hold all counts of some parts",
    ("[2,4] of [4,4]", "dp=S0, ep=P(sum)"): "ranks hold all counts of some parts",
    ("[2,4] of [4,4]", "dp=S0/2, ep=R"): "ranks hold all counts of some parts",
    ("[2,4] of [4,4]", "dp=S0, ep=R"): None,
    ("[4,4]", "dp=R, ep=R"): None,
}


@pytest.mark.parametrize(("part", "held"), HELD, ids=str)
def test_ranks_know_the_counts_of_rows_that_they_move(part: str, held: str) -> None:
    rows, there, problem = "(dp=S0, ep=S0)", "(dp=S0, ep=S1)", HELD[part, held]
    program = hir.parse(f"""host @held on mesh(dp=2, ep=2) {{
  input %x: f32[1,5,2] of [4,5,2] {rows}
  input %n: i64{part} ({held})
  %c: i64{part} ({held}) = fetch(%n, most=5)
  %s: f32[<=5:%c,2] of [4,4,5,2] {rows} = pack_rows(%x, %c)
  %r: f32[<=10:%c,2] of [4,4,5,2] {there} = alloc(%c)
  %h = post alltoall(%s) -> %r f32[4,4,5,2] {rows} => {there} axis=ep dim=0 to_dim=1 counts=%c
  wait %h
  free %s
  %b: f32[<=5:%c,2] of [4,4,5,2] {rows} = alloc(%c)
  %k = post alltoall(%r) -> %b f32[4,4,5,2] {there} => {rows} axis=ep dim=1 to_dim=0 counts=%c
  wait %k
  free %r
  %u: f32[1,5,2] of [4,5,2] {rows} = unpack_rows(%b, %c)
  free %b, %c
  return %u
}}""")
    if problem is None:
        verify(program)
        return
    with pytest.raises(mf.ProgramError, match=problem):
        verify(program)


def test_several_parts_on_a_rank() -> None:
    """Their rows for another rank do not lie together, so that one message cannot take them."""
    text = TEXT.replace("[1,5,2] of [2,5,2]", "[2,5,2] of [4,5,2]").replace(
        "[2,3,5,2]", "[4,3,5,2]"
    )
    text = text.replace("i64[1,3] of [2,3]", "i64[2,3] of [4,3]").replace("i64[2,3]", "i64[4,3]")
    text = text.replace("i64[4,3] of [4,3]", "i64[2,3] of [4,3]")
    text = text.replace("<=10:", "<=20:").replace("<=5:", "<=10:")
    with pytest.raises(mf.ProgramError, match="a rank has 2 parts"):
        verify(hir.parse(text))
