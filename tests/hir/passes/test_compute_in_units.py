"""Values that units compute where they read them: hand-written programs, and what they compute."""

from __future__ import annotations

import pytest
import torch

import mdfuse as mf
from mdfuse import Options
from mdfuse.hir.passes import compute_in_units, large_values
from mdfuse.hir.program import HostProgram
from mdfuse.hir.text.parser import parse
from mdfuse.hir.verify.check import verify

T = "f64[4,4] (x=R)"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of any size."""
    monkeypatch.setattr(large_values, "LEAST", 0)


def text(value: str, between: str = "", returns: str = "%z", reads: str = "%h") -> str:
    """A unit makes a value, %s, that another one reads behind a product."""
    return f"""host @one on mesh(x=1) {{
      input %x: {T}
      input %w: {T}
      %h: {T} = matmul(%x, %w)
      launch f(%h, %x) -> %s, %y {{
        {value}
        %a: {T} = cos(%h)
        %y: {T} = add(%a, 1.0)
      }}
      %m: {T} = matmul(%y, %w)
      {between}
      launch g(%m, %s, {reads}) -> %z {{
        %p: {T} = mul(%m, %s)
        %z: {T} = add(%p, {reads})
      }}
      return {returns}
    }}"""


def units(program: HostProgram) -> list[list[str]]:
    return [[j.fn for j in i.body] for i in program.instructions if i.op == "launch"]


def check(before: str) -> HostProgram:
    """The program behind the pass, with the same values, and its text."""
    program = parse(before)
    verify(program)
    after = compute_in_units.run(program, Options(compile="always"))
    verify(after)
    assert parse(str(after)) == after
    x, w = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))
    wanted, got = (mf.simulate(p, [x, w.clone()]).outputs for p in (program, after))
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return after


SIN = f"%s: {T} = sin(%h)"


def test_a_value_is_computed_where_it_is_read() -> None:
    """Nothing is left of it, whose type is not said either."""
    after = check(text(SIN))
    assert units(after) == [["cos", "add"], ["sin", "mul", "add"]]
    assert {x for x in after.types if x.startswith("s")} == {"s.again"}
    x, w = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))
    h = x @ w
    torch.testing.assert_close(
        *mf.simulate(after, [x, w]).outputs, ((h.cos() + 1) @ w) * h.sin() + h
    )


def test_a_chain_is_computed_where_it_is_read() -> None:
    after = check(text(f"%b: {T} = sin(%h)\n        %s: {T} = exp(%b)"))
    assert units(after) == [["cos", "add"], ["sin", "exp", "mul", "add"]]


NORMED = f"""host @one on mesh(x=1) {{
  input %x: {T}
  input %w: {T}
  %v: f64[4] (x=R) = sum(%w, dims=[0])
  launch f(%x, %w, %v) -> %s, %h, %y {{
    %h: {T} = matmul(%x, %w)
    %s: {T} = rms_norm(%h, %v, normalized_shape=[4], eps=1e-05)
    %y: {T} = matmul(%s, %w)
    %a: {T} = cos(%y)
  }}
  %m: {T} = matmul(%y, %w)
  launch g(%m, %s, %h, %v) -> %z {{
    %p: {T} = matmul(%m, %s)
    %b: {T} = add(%h, %v)
    %z: {T} = add(%p, %b)
  }}
  return %z
}}"""


def test_the_largest_norms_are_computed_where_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They follow from another result of their unit, which is there till then; small ones stay."""
    assert parse(NORMED) == check(NORMED)
    monkeypatch.setattr(compute_in_units, "ROWS", 0)
    after = check(NORMED)
    assert units(after)[1] == ["rms_norm", "matmul", "add", "add"]
    assert "-> %h, %y {" in str(after)


#: why a value stays -> the program
NOT = {
    "its operand would live longer": text(SIN, reads="%x"),
    "its operand is written before it is read": text(SIN, "%h = mul(%m, 2.0)"),
    "it is an output": text(SIN, returns="%z, %s"),
    "a product reads it, too": text(SIN, f"%v: {T} = matmul(%s, %w)", "%z, %v"),
    "it is no work of elements": text(f"%s: {T} = softmax(%h, dim=0)"),
    "it is in an order": text(f"{SIN} order=[1,0]"),
}


@pytest.mark.parametrize("name", NOT)
def test_where_a_value_stays(name: str) -> None:
    after = check(NOT[name])
    assert "s.again" not in after.types
    assert parse(NOT[name]) == after
