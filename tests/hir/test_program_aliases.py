"""Aliases in host programs: every read, write and free of a name acts on one buffer."""

from __future__ import annotations

import pytest
from helpers.host_programs import POISON, alone, numbers, parse, simulate

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.rank.pipelines import project

CHAIN = """
  input %x: f32[3] (x=R)
  {aliases}
  %c = add(%a, 1.0)
  %b = mul(%c, 2.0)
  return %{output}"""
ALIASES = ("alias %b: f32[3] (x=R) = %a", "alias %c: f32[3] (x=R) = %b", "alias %a = %x")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("output", ["a", "b", "c", "x"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_all_names_of_a_chain_are_one_buffer(
    order: tuple[int, ...], output: str, seed: int | None
) -> None:
    aliases = "\n".join(ALIASES[i] for i in order)
    x = numbers(3)
    (got,) = alone(CHAIN.format(aliases=aliases, output=output), seed, x=x)
    assert got.tolist() == x.tolist() == [2.0, 4.0, 6.0]
    assert seed is not None or got.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("used", ["c", "b"])
def test_a_name_of_a_chain_that_no_instruction_mentions(used: str) -> None:
    x = numbers(3)
    program = parse(f"""
      input %x: f32[3] (x=R)
      alias %c: f32[3] (x=R) = %b
      alias %b: f32[3] (x=R) = %a
      alias %a: f32[3] (x=R) = %x
      %{used} = add(%{used}, 1.0)
      return %x""")
    for one in (program, [project(program, 0)], [hir.parse(str(project(program, 0)))]):
        simulate(one, {"x": x})
    assert x.tolist() == [3, 4, 5]


def test_an_alias_without_a_type_has_that_of_its_buffer() -> None:
    program = parse(CHAIN.format(aliases="\n".join(ALIASES), output="c"))
    assert program.types["a"] == program.types["x"]
    assert hir.parse(str(program)) == program


IN_A_CYCLE = """
  alias %a: f32[2] (x=R) = %b
  alias %b: f32[2] (x=R) = %c
  alias %c: f32[2] (x=R) = %a
  %a = alloc
  return %a"""


def test_aliases_in_a_cycle() -> None:
    with pytest.raises(mf.ProgramError, match="%a = %b = %c = %a form a cycle"):
        alone(IN_A_CYCLE)
    with pytest.raises(mf.ProgramError, match="cycle"):
        mf.HostIrEvaluator(parse(IN_A_CYCLE))
    with pytest.raises(mf.ProgramError, match="cycle"):
        alone("alias %a: f32[2] (x=R) = %a %a = alloc return %a")


INPUT_AS_ALIAS = """
  input %x: f32[2] (x=R)
  alias %x = %y
  %y: f32[2] (x=R) = alloc
  return %y"""


def test_an_input_cannot_be_an_alias() -> None:
    program = parse(INPUT_AS_ALIAS)
    with pytest.raises(mf.ProgramError, match="inputs cannot be aliased"):
        mf.HostIrEvaluator(program)
    with pytest.raises(mf.ProgramError, match="inputs cannot be aliased"):
        simulate(program, {"x": numbers(2)})
    with pytest.raises(mf.ProgramError, match="inputs cannot be aliased"):
        simulate([project(program, 0)], {"x": numbers(2)})


def test_an_alias_of_another_size() -> None:
    body = "input %x: f32[2] (x=R) alias %y: f32[3] (x=R) = %x %y = add(%y, 1.0) return %y"
    with pytest.raises(mf.ProgramError, match="%y is an alias of %x"):
        alone(body, x=numbers(2))


def test_what_shares_memory_with_an_input_that_is_written() -> None:
    """The other input would be read too late."""
    body = """
      input %x: f32[4] (x=R)
      input %w: f32[4] (x=R)
      alias %y: f32[4] (x=R) = %x
      %y = add(%x, 1.0)
      %z: f32[4] (x=R) = mul(%w, 2.0)
      return %y, %z"""
    storage = numbers(8)
    y, z = alone(body, x=storage[:4], w=storage[4:])
    assert (y.tolist(), z.tolist()) == ([1, 2, 3, 4], [8, 10, 12, 14])
    with pytest.raises(mf.ProgramError, match="%x shares memory with %w"):
        alone(body, x=storage[:4], w=storage[2:6])


def test_ranks_that_write_into_a_global_input() -> None:
    """Each has memory of its own: what one writes no other one sees."""
    body = """
      input %x: f32[3] (x=R)
      alias %y: f32[3] (x=R) = %x
      %y = add(%y, 1.0)
      return %y"""
    x = numbers(3)
    result = mf.simulate(parse(body, "mesh(x=3)"), [x], options=POISON)
    assert [y.tolist() for (y,) in result.per_rank] == [[1, 2, 3]] * 3
    assert x.tolist() == [0, 1, 2]
