"""Values and buffers of host programs: preallocated outputs, memory, what is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.host_programs import POISON, alone, numbers, parse, simulate

import mdfuse as mf

# -- preallocated outputs ------------------------------------------------------------------------

TWO_OUTPUTS = """
  input %x: f32[4,3] of [8,3] (x=S0)
  %h: f32[4,3] of [8,3] (x=S0) = add(%x, 1.0)
  %y: f32[4,3] of [8,3] (x=S0) = mul(%h, 2.0)
  %z: f32[3,4] of [3,8] (x=S1) = permute(%h, dims=[1,0])
  return %y, %z"""


def two_outputs(**more: Any) -> list[Any]:
    rows: list[dict[str, Any]] = [{"x": numbers(4, 3)}, {"x": numbers(4, 3)}]
    rows[1].update(more)
    return simulate(parse(TWO_OUTPUTS, "mesh(x=2)"), *rows).per_rank[1]


@pytest.mark.parametrize("names", [("y",), ("z",), ("y", "z")])
def test_results_lie_in_the_callers_buffers(names: tuple[str, ...]) -> None:
    buffers = {"y": torch.empty(4, 3), "z": torch.empty(3, 4)}
    got = dict(zip("yz", two_outputs(**{n: buffers[n] for n in names}), strict=True))
    for name in names:
        assert got[name].data_ptr() == buffers[name].data_ptr()
    assert torch.equal(got["y"], 2 * (numbers(4, 3) + 1))
    assert torch.equal(got["z"], (numbers(4, 3) + 1).T)


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (torch.empty(3, 3), r"%y has shape \(3, 3\) on rank 1, expected \(4, 3\)"),
        (torch.empty(3, 4).T, r"%y has strides \(1, 4\) on rank 1, expected \(3, 1\)"),
        (torch.empty(4, 6)[:, ::2], r"strides \(6, 2\)"),
        (torch.empty(4, 3, dtype=torch.float64), "dtype torch.float64, expected torch.float32"),
        (torch.empty(4, 3, device="meta"), "is on meta, expected"),
        (torch.empty(4, 3).to_sparse(), "sparse"),
        ([1.0], "list for %y"),
    ],
)
def test_buffers_that_do_not_fit(buffer: object, words: str) -> None:
    with pytest.raises(mf.ProgramError, match=words):
        two_outputs(y=buffer)


def test_buffers_that_share_memory() -> None:
    storage = torch.empty(20)
    y, z = storage[:12].view(4, 3), storage[8:].view(3, 4)
    with pytest.raises(mf.ProgramError, match="the buffer for %z shares memory with %y"):
        two_outputs(y=y, z=z)
    x = numbers(4, 3)
    with pytest.raises(mf.ProgramError, match="the buffer for %y shares memory with %x"):
        two_outputs(x=x, y=x)


def test_unknown_names() -> None:
    with pytest.raises(mf.ProgramError, match=r"unknown \['q'\]"):
        two_outputs(q=torch.empty(4, 3))


def test_an_order_that_an_output_must_have() -> None:
    body = """
      input %x: f32[2,3] (x=R)
      %y: f32[2,3] (x=R) = add(%x, 1.0) order=[1,0]
      return %y"""
    buffer = torch.empty(3, 2).T
    (got,) = alone(body, x=numbers(2, 3), y=buffer)
    assert got.data_ptr() == buffer.data_ptr()
    assert torch.equal(got, numbers(2, 3) + 1)
    with pytest.raises(mf.ProgramError, match=r"expected \(1, 2\)"):
        alone(body, x=numbers(2, 3), y=torch.empty(2, 3))


UNIT = """
  input %x: f32[3] (x=R)
  {before}
  launch unit(%x) -> %y, %z {{
    %y: f32[3] (x=R) = add(%x, 1.0)
    %z: f32[3] (x=R) = add(%y, 1.0)
  }}
  return %y, %z"""


def test_a_host_unit_has_buffers_for_some_of_its_outputs() -> None:
    x, plain = numbers(3), UNIT.format(before="")
    for names in ("", "y", "z", "yz"):
        given = {name: torch.empty(3) for name in names}
        y, z = alone(plain, x=x, **given)
        assert y.tolist() == [1, 2, 3] and z.tolist() == [2, 3, 4]
        found = {"y": y, "z": z}
        assert all(found[name].data_ptr() == given[name].data_ptr() for name in names)


@pytest.mark.parametrize("more", ["", "%g: f32[3] (x=R) = alloc"])
def test_a_host_unit_with_some_outputs_alloced(more: str) -> None:
    body = f"""
      input %x: f32[3] (x=R)
      %h: f32[3] (x=R) = alloc
      {more}
      launch unit(%x) -> %h, %g {{
        %h = add(%x, 1.0)
        %g: f32[3] (x=R) = add(%h, 1.0)
      }}
      %y: f32[3] (x=R) = add(%h, %g)
      return %y"""
    (got,) = alone(body, x=numbers(3))
    assert got.tolist() == [3, 5, 7]


@pytest.mark.parametrize("dtype", ["f32", "i64", "bool", "bf16"])
@pytest.mark.parametrize("memory", ["", "memory=host, "])
def test_alloc_fills(dtype: str, memory: str) -> None:
    body = f"""
      input %x: {dtype}[2] (x=R)
      %h: {dtype}[2,3] (x=R) = alloc({memory}fill=1) order=[1,0]
      %h = mul(%h, 1)
      %y: {dtype}[2,3] (x=R) = alloc(fill=0)
      return %h, %y"""
    x = torch.zeros(2).to(
        {"f32": torch.float32, "i64": torch.int64, "bool": torch.bool}.get(dtype, torch.bfloat16)
    )
    if dtype == "bool":
        body = body.replace("mul(%h, 1)", "logical_and(%h, %h)")
    ones, zeros = alone(body, x=x)
    assert torch.equal(ones, torch.ones(2, 3, dtype=x.dtype)) and ones.stride() == (1, 2)
    assert torch.equal(zeros, torch.zeros(2, 3, dtype=x.dtype))
    again = parse(body)
    assert mf.hir.parse(str(again)) == again


def test_alloc_fills_the_callers_buffer() -> None:
    program = parse("%y: f32[3] (x=R) = alloc(fill=2.5) return %y")
    buffer = torch.zeros(3)
    (got,) = mf.simulate(program, per_rank=[{"y": buffer}]).outputs
    assert torch.equal(got, torch.full((3,), 2.5)) and torch.equal(buffer, got)


@pytest.mark.parametrize(
    ("kind", "fill"),
    [("i64", "0.5"), ("u8", "256"), ("u8", "-1"), ("bool", "2"), ("f32", "True"), ("f32", "word")],
)
def test_alloc_fills_with_a_number_of_its_dtype(kind: str, fill: str) -> None:
    with pytest.raises(mf.ProgramError, match=r"alloc\(fill="):
        alone(f"%y: {kind}[2] (x=R) = alloc(fill={fill}) return %y")


def test_alloc_of_what_has_a_buffer_does_nothing() -> None:
    body = """
      input %x: f32[3] (x=R)
      %h: f32[3] (x=R) = add(%x, 1.0)
      %h = alloc
      %y: f32[3] (x=R) = alloc
      %y = set(%h)
      %y = alloc
      return %y"""
    buffer = torch.empty(3)
    for given in ({}, {"y": buffer}):
        (got,) = alone(body, x=numbers(3), **given)
        assert got.tolist() == [1, 2, 3]
    assert got.data_ptr() == buffer.data_ptr()


def test_an_output_that_is_an_input() -> None:
    body = "input %x: f32[3] (x=R) return %x"
    x = numbers(3)
    (got,) = alone(body, x=x)
    assert got is x
    program = parse(body)
    (got,) = simulate(program, {"x": x}).per_rank[0]
    assert got is x


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%y: f32[3] (x=R) = add(%x, 1.0) return %y, %y", "output %y is returned twice"),
        (
            "alias %z: f32[3] (x=R) = %y %y: f32[3] (x=R) = add(%x, 1.0) return %y, %z",
            "output %z is an alias of output %y",
        ),
        ("alias %z: f32[3] (x=R) = %x %z = add(%x, 1.0) return %x, %z", "alias of output %x"),
    ],
)
def test_outputs_that_are_one_buffer(code: str, words: str) -> None:
    with pytest.raises(mf.ProgramError, match=words) as caught:
        alone(f"input %x: f32[3] (x=R) {code}", x=numbers(3))
    assert "try" in str(caught.value)


def test_an_output_that_would_be_a_view_of_another_is_a_copy() -> None:
    body = """
      input %x: f32[2,3] (x=R)
      %y: f32[2,3] (x=R) = add(%x, 1.0)
      %t: f32[3,2] (x=R) = permute(%y, dims=[1,0])
      %v: f32[3,2] (x=R) = permute(%x, dims=[1,0])
      return %y, %t, %v"""
    x = numbers(2, 3)
    y, t, v = alone(body, x=x)
    assert torch.equal(t, (x + 1).t()) and t.data_ptr() != y.data_ptr()
    assert torch.equal(v, x.t()) and v.data_ptr() == x.data_ptr()


INTO_AN_INPUT = """
  input %x: f32[3] (x=R)
  alias %y: f32[3] (x=R) = %x
  %y = add(%x, 1.0)
  return %y"""


def test_an_output_that_is_written_into_an_input() -> None:
    for given in ({}, {"y": None}):
        x = numbers(3)
        (got,) = alone(INTO_AN_INPUT, x=x, **given)
        assert got.data_ptr() == x.data_ptr()
    x = numbers(3)
    (got,) = alone(INTO_AN_INPUT, x=x, y=x)
    assert got.tolist() == [1, 2, 3]
    with pytest.raises(mf.ProgramError, match="written into input %x"):
        alone(INTO_AN_INPUT, x=x, y=torch.empty(3))


def test_outputs_on_some_ranks_only() -> None:
    body = """
      input %x: f32[2] m0(x=R)
      %y: f32[2] m0(x=R) = add(%x, 1.0)
      %z: f32[2] m1(x=R) = alloc
      %c = post broadcast(%y) -> %z f32[2] m0(x=R) => m1(x=R)
      wait %c
      return %y, %z"""
    program = parse(body, "m0=mesh(x=1), m1=mesh(x=2)")
    result = simulate(program, {"x": numbers(2)}, {})
    assert result.per_rank[1][0] is None
    assert result.per_rank[1][1].tolist() == [1, 2]
    with pytest.raises(mf.ProgramError, match="a tensor for %y on rank 1"):
        simulate(program, {"x": numbers(2)}, {"y": torch.empty(2)})


def test_empty_outputs() -> None:
    body = """
      input %x: f32[1,3] (x=S0)
      %y: f32[1,3] (x=S0) = add(%x, 1.0)
      return %y"""
    program = parse(body, "mesh(x=2)")
    buffers = [torch.empty(1, 3), torch.empty(0, 3)]
    rows = [{"x": numbers(1, 3), "y": buffers[0]}, {"x": numbers(0, 3), "y": buffers[1]}]
    result = simulate(program, *rows)
    assert result.per_rank[0][0].tolist() == [[1, 2, 3]]
    assert result.per_rank[1][0] is buffers[1]


# -- what is not there ---------------------------------------------------------------------------


def test_the_values_of_a_run_do_not_outlive_it() -> None:
    body = """
      input %x: f32[] (x=R)
      input %n: i64 scalar
      %h: f32[] (x=R) = alloc
      %y: f32[] (x=R) = add(%h, %x)
      return %y"""
    for _ in range(3):
        (got,) = alone(body, x=torch.tensor(1.0), n=0)
        assert torch.isnan(got)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%y: f32[2] (x=R) = add(%h, 1.0)", "add -> y reads %h, which nothing computed"),
        ("%y: f32[2] (x=R) = add(%y, 1.0)", "add -> y reads %y"),
        ("%y: f32[2] (x=R) = select(%h, dim=0, index=0)", "select -> y reads %h"),
        ("%y: f32[2] (x=R) = add(%x, 1.0) wait %c", "wait %c, which nothing posted before"),
        ("%y: f32[2] (x=R) = add(%x, 1.0) wait %c[1]", "wait %c, which nothing posted before"),
        ("%s = send(%h, to=0)", "send -> s reads %h"),
        ("free %h", "free of %h, which nothing computed"),
        ("%y: f32[2] (x=R) = alloc free %x", "free of %x, which is an input"),
        ("%y: f32[2] (x=R) = add(%x, 1.0) free %y", "free of %y, which is an output"),
        ("for %i in 0..extent(%h,0) { }", r"extent\(%h,0\), but %h is no buffer"),
        (
            "%h = alloc %y: f32[2] (x=R) = set(%h) free %h free %h",
            "free of %h, which was freed",
        ),
        ("%h = alloc free %h %y: f32[2] (x=R) = add(%h, 1.0)", "reads %h"),
        ("", "return of %y, which nothing computed"),
    ],
)
def test_what_nothing_computed(code: str, words: str) -> None:
    code = code.replace("%h = alloc", "%h: f32[2] (x=R) = alloc", 1)
    body = f"input %x: f32[2] (x=R) {code} return %y: f32[2] (x=R)"
    with pytest.raises(mf.ProgramError, match=words):
        alone(body, x=numbers(2), y=torch.empty(2))


def test_the_error_says_where_and_what_to_do() -> None:
    body = "%y: f32[2] (x=R) = add(%h, 1.0) return %y"
    with pytest.raises(mf.ProgramError) as caught:
        alone(body)
    text = str(caught.value)
    assert "@small: add -> y reads %h" in text
    assert "each run starts with an empty table of values" in text
    assert "try" in text


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["device", "host", "pinned", "symmetric"])
@pytest.mark.parametrize(("order", "strides"), [("contiguous", (3, 1)), ("order=[1,0]", (1, 2))])
def test_alloc(memory: str, order: str, strides: tuple[int, ...]) -> None:
    body = f"%y: f32[2,3] (x=R) = alloc(memory={memory}) {order} return %y"
    (got,) = alone(body)
    assert got.shape == (2, 3)
    assert got.stride() == strides
    assert got.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [("i8", 127), ("i64", 2**63 - 1), ("bool", True), ("u8", 255), ("i16", 2**15 - 1)],
)
def test_poison_of_integers(dtype: str, poison: int) -> None:
    (got,) = alone(f"%y: {dtype}[2] (x=R) = alloc return %y")
    assert got.tolist() == [poison] * 2


def test_memory_that_there_is_not() -> None:
    with pytest.raises(mf.ProgramError, match=r"alloc\(memory=moon\)") as caught:
        alone("%y: f32[2] (x=R) = alloc(memory=moon) return %y")
    assert "device, host, pinned, symmetric" in str(caught.value)


def test_nothing_is_recorded_for_autograd() -> None:
    """Writing into given buffers would be refused by torch; and outputs are values, not graphs."""
    body = """
      input %x: f32[3] (x=R)
      %y: f32[3] (x=R) = add(%x, 1.0)
      return %y"""
    x = numbers(3).requires_grad_()
    for given in ({}, {"y": torch.empty(3)}):
        with pytest.raises(mf.ProgramError, match="%x requires grad"):
            alone(body, x=x, **given)
        with torch.no_grad():
            (got,) = alone(body, x=x, **given)
        assert not got.requires_grad
        assert torch.equal(got, numbers(3) + 1.0)


def test_an_error_of_torch_says_in_which_instruction() -> None:
    body = """
      input %x: f32[3] (x=R)
      input %w: f32[4] (x=R)
      %y: f32[3] (x=R) = add(%x, %w)
      return %y"""
    with pytest.raises(RuntimeError) as caught:
        mf.simulate(parse(body), per_rank=[{"x": numbers(3), "w": numbers(4)}], options=POISON)
    assert caught.value.__notes__ == ["in %y = add"]
