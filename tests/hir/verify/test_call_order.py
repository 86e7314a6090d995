"""Calls that would compute something else are refused, with the calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.calls import CALLS, TWO_MESHES, ordered
from helpers.programs import program_text

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.verify.check import verify


def refused(text: str) -> str:
    with pytest.raises(mf.ProgramError) as error:
        verify(hir.parse(text))
    return str(error.value)


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_a_call_that_is_left_out(at: int) -> None:
    found = refused(ordered(*CALLS[:at], *CALLS[at + 1 :]))
    assert CALLS[at] in found


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_a_call_that_comes_twice(at: int) -> None:
    found = refused(ordered(*CALLS[: at + 1], *CALLS[at:]))
    assert f"{CALLS[at]} for the second time" in found


def is_too_early(calls: list[str]) -> bool:
    """Whether some index goes through the blocks in another order than F0, T01, F1."""
    return any(
        [c for c in calls if f"({k})" in c] != [c for c in CALLS if f"({k})" in c] for k in range(3)
    )


def test_swapped_calls_are_refused_or_compute_the_same() -> None:
    x = torch.arange(5.0)
    accepted = 0
    for a, b in itertools.combinations(range(len(CALLS)), 2):
        calls = [*CALLS]
        calls[a], calls[b] = calls[b], calls[a]
        program = hir.parse(ordered(*calls))
        if is_too_early(calls):
            assert refused(str(program)).count("call ") >= 2
            continue
        accepted += 1
        y, s = mf.simulate(program, per_rank=[{"x": x}, {}]).per_rank[1]
        assert torch.equal(y, x * x + torch.tensor([0.0, 0, 1, 1, 2]))
        assert torch.equal(s, (x * x).sum())
    assert accepted


def test_the_call_that_comes_too_late_is_shown() -> None:
    calls = ["call F1(0)", *(c for c in CALLS if c != "call F1(0)")]
    assert "call F1(0) reads %c0, which call T01(0) makes, later" in refused(ordered(*calls))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("call F1(2)", "call F1(3)", "no such index of block F1: it is about 3 chunks"),
        ("call F1(2)", "call F1(-1)", "no such index of block F1"),
        ("call F1(2)", "call F2(2)", "there is no block F2"),
        ("  call F1(2)", "  for %k in 0..1 {\n  call F1(2)\n  }", "call F1(2) inside of for"),
        ("block @F1", "block @F0", "two blocks are named F0"),
        ("(%i) on m1", "(%y)", "%y"),
    ],
)
def test_calls_of_what_there_is_not(old: str, new: str, what: str) -> None:
    text = TWO_MESHES.replace(old, new)
    assert text != TWO_MESHES
    assert what in refused(text)


@pytest.mark.parametrize("new", ["call F2(2)", "call F1(1)", "call F1(3)", ""])
def test_an_unverified_program_is_refused_as_well(new: str) -> None:
    """Where the call is one of no block, too: no rank has a part in what there is not."""
    program = hir.parse(TWO_MESHES.replace("call F1(2)", new))
    with pytest.raises(mf.ProgramError, match=r"call F\d\(\d\)"):
        mf.simulate(program, per_rank=[{"x": torch.ones(5)}, {}], options=mf.Options(verify=False))


def test_the_index_of_a_call_is_a_number() -> None:
    assert "the index of a call is a number" in refused(
        TWO_MESHES.replace("call F1(2)", "call F1(rank)")
    )


def test_what_belongs_to_an_index_is_not_read_outside() -> None:
    text = TWO_MESHES.replace(
        "  return", "  %z: f32[2] of [5] m0(a=R, chunk(0,3,0)) = exp(%h)\n  return"
    )
    assert "reads %h, which nothing computed" in refused(text)


PRODUCTS = program_text("calls/products")


@pytest.mark.parametrize("is_verified", [True, False])
@pytest.mark.parametrize("call", ["take(0)", "take(1)", "add(0)", "add(1)"])
def test_an_accumulator_is_not_freed_between_calls(call: str, is_verified: bool) -> None:
    """Nor before the first part comes: a product would have no buffer to be computed in."""
    x, w = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(4, 3)
    (y,) = mf.simulate(hir.parse(PRODUCTS), [x, w]).outputs
    assert torch.equal(y, -(x @ w))
    broken = hir.parse(PRODUCTS.replace(f"  call {call}", f"  free %z\n  call {call}"))
    with pytest.raises(
        mf.ProgramError, match=r"%z, (which was freed before|to which only the parts of)"
    ):
        mf.simulate(broken, [x, w], options=mf.Options(verify=is_verified))


ONE_OF_TWO_PARTS = """
host @products on mesh(x=1) {
  input %x: f32[3,4] (x=R)
  %z: f32[3] (x=R) = alloc
  for %i in 0..1 {
    %x.i: f32[3,2] of [3,4] (x=R, chunk(1,2,%i)) = chunk(%x)
    %z.i: f32[3] (x=R, chunk(P(sum),2,%i)) = sum(%x.i, dims=[1])
    %z = accumulate(%z.i)
    free %z.i, %x.i
  }
  free %z
  return %x
}"""


@pytest.mark.parametrize("is_verified", [True, False])
def test_an_accumulator_that_nothing_reads_is_complete_where_it_is_freed(is_verified: bool) -> None:
    options = mf.Options(verify=is_verified)
    with pytest.raises(mf.ProgramError, match=r"free uses %z, to which only the parts of 1"):
        mf.simulate(hir.parse(ONE_OF_TWO_PARTS), [torch.ones(3, 4)], options=options)
