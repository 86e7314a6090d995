"""Results of units in the memory of operands: where they lie there, where not, what is computed."""

from __future__ import annotations

import pytest
import torch
from helpers import compiled_suite

import mdfuse as mf
from mdfuse import Options
from mdfuse.hir.passes import large_values, write_over_operands
from mdfuse.hir.program import HostProgram
from mdfuse.hir.text.parser import parse
from mdfuse.hir.verify.check import verify

T, V = "f64[4,4] (x=R)", "f64[2,8] (x=R)"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of any size."""
    monkeypatch.setattr(large_values, "LEAST", 0)


def text(unit: str, behind: str = "", returns: str = "%z", before: str = "") -> str:
    return f"""host @one on mesh(x=1) {{
      input %x: {T}
      input %w: {T}
      %h: {T} = matmul(%x, %w)
      {before}
      {unit}
      {behind}
      return {returns}
    }}"""


def run(before: str) -> tuple[HostProgram, HostProgram, dict[str, str]]:
    """The program, the same behind the pass, and result -> the operand it lies over."""
    program = parse(before)
    verify(program)
    after = write_over_operands.run(program, Options(compile="always"))
    verify(after)
    assert parse(str(after)) == after
    pairs = {}
    for a, b in zip(program.instructions, after.instructions, strict=True):
        if a.op == "launch":
            pairs |= {x: y for x, y in zip(a.outputs, b.outputs, strict=True) if x != y}
    return program, after, pairs


def check(before: str, pairs: dict[str, str]) -> HostProgram:
    program, after, chosen = run(before)
    assert chosen == pairs
    x, w = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))
    wanted, got = (mf.simulate(p, [x, w]).outputs for p in (program, after))
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return after


ONE = f"""launch f(%h) -> %y {{
        %a: {T} = sin(%h)
        %y: {T} = add(%a, 1.0)
      }}"""


def test_a_result_lies_where_its_operand_lay() -> None:
    after = check(text(ONE, f"%z: {T} = matmul(%y, %w)"), {"y": "h"})
    assert "y" not in after.types and "%z: f64[4,4] (x=R) = matmul(%h, %w)" in str(after)


def test_values_are_those_of_torch() -> None:
    _, after, _ = run(text(ONE, f"%z: {T} = matmul(%y, %w)"))
    x, w = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))
    (got,) = mf.simulate(after, [x, w]).outputs
    torch.testing.assert_close(got, ((x @ w).sin() + 1) @ w)


def test_each_operand_has_one_result() -> None:
    unit = f"""launch f(%h, %g) -> %y, %u, %v {{
        %y: {T} = mul(%h, %g)
        %u: {T} = add(%h, %g)
        %v: {T} = sub(%h, %g)
      }}"""
    before = f"%g: {T} = matmul(%w, %x)"
    behind = f"%p: {T} = matmul(%y, %u)\n      %z: {T} = matmul(%p, %v)"
    after = check(text(unit, behind, before=before), {"y": "h", "u": "g"})
    (launch,) = (i for i in after.instructions if i.op == "launch")
    # the third result reads both operands, so that the first two are copied over them at the end
    assert [(i.fn, *i.outputs) for i in launch.body[-2:]] == [("set", "h"), ("set", "g")]


def test_a_chain_of_units_lies_in_one_memory() -> None:
    second = f"""launch g(%y) -> %v {{
        %b: {T} = exp(%y)
        %v: {T} = mul(%b, 0.5)
      }}"""
    after = check(text(f"{ONE}\n      {second}", f"%z: {T} = matmul(%v, %w)"), {"y": "h", "v": "h"})
    assert {x for i in after.instructions if i.op == "launch" for x in i.outputs} == {"h"}


def unit(body: str, reads: str = "%h", makes: str = "%y") -> str:
    return f"launch f({reads}) -> {makes} {{\n        {body}\n      }}"


PLUS = f"%y: {T} = add(%h, 1.0)"
Z = f"%z: {T} = matmul(%y, %w)"
VIEW = f"%t: {T} = permute(%h, dims=[1,0])"
#: why nothing lies there -> the program
NOT = {
    "it is read behind": text(unit(PLUS), f"%v: {T} = matmul(%y, %h)\n      {Z}", "%z, %v"),
    "a view is read behind": text(
        unit(PLUS), f"%v: {T} = matmul(%y, %t)\n      {Z}", "%z, %v", VIEW
    ),
    "it is an output": text(unit(PLUS), Z, "%z, %h"),
    "the result is an output": text(unit(PLUS), Z, "%z, %y"),
    "it is a view": text(unit(f"%y: {T} = add(%t, 1.0)", "%t"), Z, before=VIEW),
    "the unit reads a view, too": text(unit(f"%y: {T} = add(%h, %t)", "%h, %t"), Z, before=VIEW),
    "another result is made of a view": text(
        unit(f"{PLUS}\n        %s: {V} = mul(%v, 3.0)", "%h, %v", "%y, %s"),
        f"%u: {V} = add(%s, 1.0)\n      {Z}", "%z, %u",
        f"%v: {V} = reshape(%h, shape=[2,8])",
    ),
    "it is an input": text(unit(f"%y: {T} = add(%w, 1.0)", "%w"), f"%z: {T} = matmul(%y, %h)"),
    "other elements are read": text(
        unit(f"{VIEW}\n        %y: {T} = add(%t, 1.0)"), Z
    ),
    "a sum is beside it": text(
        unit(
            f"%s: f64[4,1] (x=R) = sum(%h, dims=[1], keepdim=True)\n        {PLUS}",
            makes="%y, %s",
        ),
        f"%v: {T} = add(%y, %s)\n      {Z}", "%z, %v",
    ),
    "a product reads the result": text(
        unit(f"{PLUS}\n        %m: {T} = matmul(%y, %w)", "%h, %w", "%y, %m"),
        f"%v: {T} = matmul(%y, %m)\n      {Z}", "%z, %v",
    ),
    "the result has another dtype": text(
        unit("%y: f32[4,4] (x=R) = cast(%h, dtype=f32)"),
        f"%v: {T} = cast(%y, dtype=f64)\n      %z: {T} = matmul(%v, %w)",
    ),
    "the result requires an order": text(unit(f"{PLUS} contiguous"), Z),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT)
def test_where_nothing_lies(name: str) -> None:
    check(NOT[name], {})


#: What makes an operand -> whether a plan knows its strides, however those of its operands are.
MAKERS = {
    "matmul(%x, %w)": True, "mul(%x, %w)": True, "sin(%x)": False, "sin(%x) contiguous": True,
    "softmax(%x, dim=0)": False, "sub(1.0, %x)": False, "full(2.0, shape=[4,4], dtype=f64)": False,
}  # fmt: skip


#: A unit that makes an operand -> the same. It is not compiled where it comes to one call.
UNITS = {
    f"%h: {T} = softmax(%x, dim=0)\n        %d: {T} = set(%w) order=[1,0]": False,
    f"%h: {T} = matmul(%x, %w)\n        %d: {T} = set(%w) order=[1,0]": True,
    f"%h: {T} = softmax(%x, dim=0)\n        %d: {T} = sin(%w)": True,
}


@pytest.mark.parametrize("maker", [*MAKERS, *UNITS])
def test_nothing_lies_over_what_torch_lays_out(maker: str) -> None:
    """A unit that writes into memory is compiled for its strides; operands here lie by columns."""
    before = text(ONE, Z).replace("matmul(%x, %w)", maker)
    if maker in UNITS:
        before = text(ONE, Z, "%z, %d").replace(
            f"%h: {T} = matmul(%x, %w)", f"launch e(%x, %w) -> %h, %d {{\n{maker}\n}}"
        )
    program, after, pairs = run(before)
    assert pairs == ({"y": "h"} if {**MAKERS, **UNITS}[maker] else {})
    x, w = (torch.randn(4, 4, dtype=torch.float64).t() for _ in range(2))
    refused = compiled_suite.REFUSED.copy()
    with compiled_suite.launches():
        got = mf.simulate(after, [x, w]).outputs
    assert refused == compiled_suite.REFUSED
    for a, b in zip(got, mf.simulate(program, [x, w]).outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_only_large_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_values, "LEAST", 4 * 4 * 8 + 1)
    check(text(ONE, Z), {})
    monkeypatch.setattr(large_values, "LEAST", 4 * 4 * 8)
    check(text(ONE, Z), {"y": "h"})


def test_nothing_without_units_or_with_streams() -> None:
    program = parse(text(ONE, Z))
    assert write_over_operands.run(program, Options(compile="never")) is program
