"""Loops and branches of host programs: what each iteration drops, and what persists."""

from __future__ import annotations

import pytest
import torch
from helpers.host_programs import alone, numbers, parse, simulate

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.rank import unroll

SEEDS = [None, 0, 1]

# -- in-place updates ----------------------------------------------------------------------------

SUM = """
  input %x: f32[] (x=R)
  alias %y: f32[] (x=R) = %x
  for %i in {bounds} {{
    %y = add(%y, %i)
  }}
  return %y"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("bounds", "total"),
    [
        ("1..6 step 2", 9),
        ("0..4", 6),
        ("5..0 step -2", 9),
        ("3..3", 0),
        ("4..1", 0),
        ("0..5 step -1", 0),
        ("2..3 step 100", 2),
        ("-2..2", -2),
    ],
)
def test_a_sum_in_the_callers_buffer(bounds: str, total: int, seed: int | None) -> None:
    x = torch.tensor(21.0)
    (got,) = alone(SUM.format(bounds=bounds), seed, x=x)
    assert got.item() == x.item() == 21 + total
    assert seed is not None or got.data_ptr() == x.data_ptr()


def test_an_output_buffer_that_is_alloced_persists() -> None:
    body = """
      input %x: f32[] (x=R)
      %y: f32[] (x=R) = alloc
      %y = set(%x)
      for %i in 1..6 step 2 {
        %y = add(%y, %i)
      }
      return %y"""
    buffer = torch.empty(())
    for given in ({}, {"y": buffer}):
        (got,) = alone(body, x=torch.tensor(21.0), **given)
        assert got.item() == 30
    assert got is buffer


@pytest.mark.parametrize("seed", SEEDS)
def test_an_output_that_each_iteration_computes_anew(seed: int | None) -> None:
    """The last iteration's is returned, in the caller's buffer where there is one."""
    body = """
      input %x: f32[2] (x=R)
      for %i in 1..4 {
        %y: f32[2] (x=R) = mul(%x, %i)
      }
      return %y"""
    buffer = torch.empty(2)
    for given in ({}, {"y": buffer}):
        (got,) = alone(body, seed, x=numbers(2), **given)
        assert got.tolist() == [0, 3]
    assert seed is not None or got is buffer


@pytest.mark.parametrize("body", ["%y: f32[] (x=R) = add(%y, %i)", "%h: f32[] (x=R) = add(%h, %i)"])
def test_what_is_computed_from_the_index_is_dropped(body: str) -> None:
    """It cannot be read before the iteration computes it, be it an output or not."""
    text = f"""
      input %x: f32[] (x=R)
      for %i in 0..3 {{
        {body}
        %y: f32[] (x=R) = add(%x, %i)
        %h: f32[] (x=R) = add(%x, %i)
      }}
      return %y"""
    with pytest.raises(mf.ProgramError, match="which nothing computed"):
        alone(text, x=torch.tensor(0.0))


def test_what_a_later_instruction_of_the_loop_computes() -> None:
    body = """
      input %x: f32[] (x=R)
      for %i in 0..3 {
        %y: f32[] (x=R) = add(%h, %i)
        %h: f32[] (x=R) = add(%x, 1.0)
      }
      return %y"""
    with pytest.raises(mf.ProgramError, match="reads %h, which nothing computed"):
        alone(body, x=torch.tensor(0.0))


# -- nested --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_nested_loops(seed: int | None) -> None:
    body = """
      input %x: f32[3,4] (x=R)
      %y: f32[] (x=R) = sum(%x)
      for %i in 0..3 {
        %row: f32[4] (x=R) = select(%x, dim=0, index=%i)
        for %j in %i..4 step 2 {
          %e: f32[] (x=R) = select(%row, dim=0, index=%j)
          %y = add(%y, %e)
        }
      }
      return %y"""
    x = numbers(3, 4)
    want = x.sum() + sum(x[i, j] for i in range(3) for j in range(i, 4, 2))
    (got,) = alone(body, seed, x=x)
    assert got == want


@pytest.mark.parametrize("seed", SEEDS)
def test_an_inner_loop_that_reuses_the_index_of_the_outer(seed: int | None) -> None:
    body = """
      input %x: f32[] (x=R)
      alias %y: f32[] (x=R) = %x
      for %i in 0..2 {
        for %i in 10..12 {
          %y = add(%y, %i)
        }
        %y = mul(%y, %i + 1)
      }
      return %y"""
    (got,) = alone(body, seed, x=torch.tensor(0.0))
    assert got.item() == (21 * 1 + 21) * 2


# -- branches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "wants"),
    [
        ("rank", [20, 10]),
        ("rank == 1", [20, 10]),
        ("coord(x) < 1", [10, 20]),
        ("extent(%x,0) > 2", [10, 20]),
        ("extent(%x,1) == 1", [10, 10]),
        ("rank + extent(%x,0) == 3", [10, 10]),
        ("0", [20, 20]),
        ("1", [10, 10]),
    ],
)
def test_branches_on_what_a_rank_knows(test: str, wants: list[int]) -> None:
    body = f"""
      input %x: f32[3,1] of [5,1] (x=S0)
      %s: f32[] (x=P(sum)) = sum(%x)
      %s = mul(%s, 0.0)
      if {test} {{
        %s = add(%s, 10.0)
      }} else {{
        %s = add(%s, 20.0)
      }}
      %y: f32[] (x=R) = alloc
      %y = set(%s)
      return %y"""
    program = parse(body, "mesh(x=2)")
    assert hir.parse(str(program)) == program
    rows = [{"x": numbers(3, 1)}, {"x": numbers(2, 1)}]
    result = simulate(program, *rows)
    assert [outputs[0].item() for outputs in result.per_rank] == wants


def test_bounds_and_steps_that_depend_on_the_rank() -> None:
    body = """
      input %x: f32[] (x=R)
      alias %y: f32[] (x=R) = %x
      for %i in rank..6 step coord(x) + 1 {
        %y = add(%y, %i)
      }
      return %y"""
    rows = [{"x": torch.tensor(0.0)} for _ in range(2)]
    result = simulate(parse(body, "mesh(x=2)"), *rows)
    assert [outputs[0].item() for outputs in result.per_rank] == [15, 1 + 3 + 5]


def test_a_value_of_one_branch_only() -> None:
    body = """
      input %x: f32[] (x=R)
      if rank == 0 {
        %y: f32[] (x=R) = add(%x, 1.0)
      }
      return %y"""
    with pytest.raises(mf.ProgramError, match=r"return of %y, which nothing computed\n  rank 1 "):
        simulate(parse(body, "mesh(x=2)"), *[{"x": torch.tensor(0.0)}] * 2)


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("for %i in 0..3 step 0 { %y = add(%y, %i) }", "a loop over %i with step 0"),
        ("for %i in 0..3 step rank { %y = add(%y, %i) }", "a loop over %i with step 0"),
        ("for %i in 0..3 { %y = add(%y, 1) } %y = add(%y, %i)", "reads %i, which nothing computed"),
        ("for %i in 0..3 { %y = add(%y, 1) } %y = add(%y, %i + 1)", r"add: the index %i \+ 1"),
        ("for %i in 0..3 { } if %i == 1 { %y = add(%y, 1) }", "the branch on %i == 1"),
        ("for %i in 0..%i { %y = add(%y, 1) }", "the loop's stop %i has no value"),
        ("for %i in 0..2 { } set_stream %i", "set_stream: the index %i"),
        ("set_stream -1", "set_stream -1"),
        ("for %i in 0..101 { %y = add(%y, 1) }", "up to 100 iterations"),
    ],
)
def test_what_is_refused(code: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "LIMIT", 100)
    body = f"input %x: f32[] (x=R) alias %y: f32[] (x=R) = %x {code} return %y"
    with pytest.raises(mf.ProgramError, match=words):
        alone(body, x=torch.tensor(0.0))


def test_a_stream_that_get_stream_did_not_give() -> None:
    body = """
      input %x: f32[] (x=R)
      %s = get_stream
      for %i in 0..1 {
        %t = get_stream
      }
      set_stream %s
      sync %t
      %y: f32[] (x=R) = add(%x, 1.0)
      return %y"""
    assert alone(body, x=torch.tensor(1.0))[0].item() == 2
    instructions = parse(body).instructions
    program = parse(body.replace("%s = get_stream", ""))
    assert instructions[0].op == "get_stream"
    with pytest.raises(mf.ProgramError, match="set_stream"):
        simulate(program, {"x": torch.tensor(1.0)})
