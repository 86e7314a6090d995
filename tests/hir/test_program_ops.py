"""Local ops of host programs: bound to a new buffer, or written into one that is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.host_programs import alone, numbers
from torch import Tensor

import mdfuse as mf
from mdfuse.ir.graph import DTYPE_NAMES

F = torch.nn.functional
SEEDS = (None, 0)


def type_of(x: Tensor) -> str:
    return f"{DTYPE_NAMES[x.dtype]}[{','.join(map(str, x.shape))}] (x=R)"


def bits(x: Tensor) -> Tensor:
    return x.new_empty(x.numel()).copy_(x.reshape(-1)).view(torch.uint8)


def check(call: str, expected: Tensor, **inputs: Any) -> None:
    """Every way in which a result may meet a buffer gives the bits of plain torch.

    Bound; in an alloc'ed buffer; in the caller's buffer; in a slice of a larger buffer, once a row
    of blocks and once a column of them.
    """
    kind = type_of(expected)
    head = "\n".join(f"input %{n}: {type_of(x)}" for n, x in inputs.items())
    whole = torch.empty((*expected.shape, 3), dtype=expected.dtype)
    slices = [
        f"%all: {type_of(whole)} = alloc %y: {kind} = select(%all, dim={whole.ndim - 1}, index=1)",
        f"%all: {type_of(whole.movedim(-1, 0))} = alloc %y: {kind} = select(%all, dim=0, index=1)",
    ]
    buffer = torch.empty(expected.shape, dtype=expected.dtype)
    for seed in SEEDS:
        for before in ("", f"%y: {kind} = alloc", *slices):
            (got,) = alone(f"{head} {before} %y: {kind} = {call} return %y", seed, **inputs)
            assert got.dtype == expected.dtype and got.shape == expected.shape, before
            assert torch.equal(bits(got), bits(expected)), before
        (got,) = alone(f"{head} %y: {kind} = {call} return %y", seed, **inputs, y=buffer)
        assert seed is not None or got.data_ptr() == buffer.data_ptr()
        assert torch.equal(bits(buffer), bits(expected))


#: Calls on %a, f32[8,64], and %b, f16[64]: each form of writes, and calls without any.
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add(%a, %b)": torch.add,
    "sub(2.3, %a)": lambda a, b: 2.3 - a,
    "mul(2.3, %b)": lambda a, b: 2.3 * b,
    "maximum(0.0, %a)": lambda a, b: a.clamp(min=0.0),
    "where(%m, 2.0, %a)": lambda a, b: torch.where(a > 1, 2.0, a),
    "cast(%a, dtype=bf16)": lambda a, b: a.bfloat16(),
    "softmax(%a, dim=0)": lambda a, b: a.softmax(0),
    "cat(%a, %a, dim=1)": lambda a, b: torch.cat([a, a], 1),
    "sum(%b, dtype=f32)": lambda a, b: b.sum(dtype=torch.float32),
    "max(%a, dims=[-1], keepdim=True)": lambda a, b: a.amax(1, keepdim=True),
    "any(%a, dims=[0])": lambda a, b: a.any(0),
    "matmul(%a, %a.T)": lambda a, b: a @ a.T,
    "linear(%a, %a, None)": F.linear,
}


@pytest.mark.parametrize("call", CALLS)
def test_results_meet_buffers(call: str) -> None:
    """Which bits each op writes is tested where it is defined (`tests/ir/test_writes.py`)."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 64) * 4, (torch.randn(64) * 4).half()
    for x in (a, a.T.contiguous().T):
        given = {"a": x, "b": b, "m": x > 1, "a.T": x.T}
        want = CALLS[call](x, x if call.startswith("linear") else b)
        check(call, want, **{n: v for n, v in given.items() if f"%{n}," in f"{call[:-1]},"})


# -- where operand and result are one buffer -----------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("%y = add(%y, %y)", lambda x: x + x),
        ("%y = sigmoid(%y)", torch.sigmoid),
        ("%y = add(%y, %x)", lambda x: x + x),
        ("%y = where(%m, %y, 0.0)", lambda x: torch.where(x > 4, x, 0.0)),
        ("%y = sub(1.0, %y)", lambda x: 1 - x),
        ("%y = matmul(%y, %y)", lambda x: x @ x),
        ("%y = matmul(%w, %y)", lambda x: (x + 1) @ x),
        ("%y = linear(%y, %w)", lambda x: F.linear(x, x + 1)),
        ("%y = permute(%y, dims=[1,0])", lambda x: x.T),
        ("%t = permute(%y, dims=[1,0]) %y = set(%t)", lambda x: x.T),
        ("%t = permute(%y, dims=[1,0]) %y = add(%y, %t)", lambda x: x + x.T),
        ("%t = permute(%y, dims=[1,0]) %y = matmul(%t, %w)", lambda x: x.T @ (x + 1)),
        ("%y = softmax(%y, dim=0)", lambda x: x.softmax(0)),
        ("%y = cat(%w, dim=0) %y = set(%y)", lambda x: x + 1),
    ],
)
def test_into_its_own_operand(
    code: str, expected: Callable[[Tensor], Tensor], seed: int | None
) -> None:
    """Element by element in place; all else is computed, then copied."""
    x = numbers(3, 3)
    want = expected(x.clone())
    body = f"""
      input %x: f32[3,3] (x=R)
      input %w: f32[3,3] (x=R)
      input %m: bool[3,3] (x=R)
      alias %y: f32[3,3] (x=R) = %x
      {code.replace("%t =", "%t: f32[3,3] (x=R) =")}
      return %y"""
    (got,) = alone(body, seed, x=x, w=x + 1, m=x > 4)
    assert torch.equal(got, want)
    assert torch.equal(x, want)


@pytest.mark.parametrize(
    ("first", "second"), [("0..3", "1..4"), ("1..4", "0..3"), ("0..2", "2..4"), ("0..4", "0..4")]
)
def test_a_part_into_another_part_of_one_buffer(first: str, second: str) -> None:
    """Parts that overlap are copied as if they did not."""
    a, b = ([int(n) for n in part.split("..")] for part in (first, second))
    body = f"""
      input %x: f32[4,2] (x=R)
      alias %y: f32[4,2] (x=R) = %x
      %a: f32[{a[1] - a[0]},2] (x=R) = slice(%y, starts=[{a[0]},0], ends=[{a[1]},2], steps=[1,1])
      %b: f32[{b[1] - b[0]},2] (x=R) = slice(%y, starts=[{b[0]},0], ends=[{b[1]},2], steps=[1,1])
      %b = set(%a)
      return %y"""
    x = numbers(4, 2)
    want = x.clone()
    want[slice(*b)] = x[slice(*a)].clone()
    (got,) = alone(body, x=x)
    assert torch.equal(got, want)


def test_an_input_that_is_written_is_not_copied_by_a_cast_to_its_own_dtype() -> None:
    """A cast is a new value, whatever the dtypes."""
    body = """
      input %x: f32[3] (x=R)
      alias %y: f32[3] (x=R) = %x
      %old: f32[3] (x=R) = cast(%x, dtype=f32)
      %y = add(%y, 1.0)
      return %old, %y"""
    old, new = alone(body, x=numbers(3))
    assert (old.tolist(), new.tolist()) == ([0, 1, 2], [1, 2, 3])


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "mean"])
def test_a_reduction_over_no_dims_is_a_new_value(op: str) -> None:
    body = f"""
      input %x: f32[3] (x=R)
      alias %y: f32[3] (x=R) = %x
      %old: f32[3] (x=R) = {op}(%x, dims=[])
      %y = add(%y, 1.0)
      return %old, %y"""
    old, new = alone(body, x=numbers(3))
    assert (old.tolist(), new.tolist()) == ([0, 1, 2], [1, 2, 3])


# -- set and permute -----------------------------------------------------------------------------


def test_set_binds_its_operand() -> None:
    x = numbers(2, 3)
    (got,) = alone("input %x: f32[2,3] (x=R) %y: f32[2,3] (x=R) = set(%x) return %y", x=x)
    assert got.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("order", "strides"), [("contiguous", (12, 4, 1)), ("order=[2,0,1]", (3, 1, 6))]
)
def test_set_copies_where_an_order_is_required(order: str, strides: tuple[int, ...]) -> None:
    x = numbers(2, 4, 3).transpose(1, 2)
    body = f"input %x: f32[2,3,4] (x=R) %y: f32[2,3,4] (x=R) = set(%x) {order} return %y"
    (got,) = alone(body, x=x)
    assert got.data_ptr() != x.data_ptr()
    assert got.stride() == strides
    assert torch.equal(got, x)


def test_set_copies_into_a_buffer() -> None:
    x, buffer = numbers(2, 3), torch.empty(2, 3)
    body = "input %x: f32[2,3] (x=R) %y: f32[2,3] (x=R) = set(%x) return %y"
    (got,) = alone(body, x=x, y=buffer)
    assert got is buffer
    assert torch.equal(got, x)


def test_permute_is_a_view_or_dense() -> None:
    x = numbers(2, 3, 4)
    text = "input %x: f32[2,3,4] (x=R) %y: f32[4,2,3] (x=R) = permute(%x, dims=[2,0,1]){} return %y"
    (view,) = alone(text.format(""), x=x)
    (dense,) = alone(text.format(" contiguous"), x=x)
    assert view.data_ptr() == x.data_ptr()
    assert dense.is_contiguous() and dense.data_ptr() != x.data_ptr()
    assert torch.equal(view, x.permute(2, 0, 1))
    assert torch.equal(dense, x.permute(2, 0, 1))


@pytest.mark.parametrize("dims", ["[0,0]", "[0]", "[0,2]", "[0,1,2]", "[0,-2]"])
def test_dims_that_are_no_permutation(dims: str) -> None:
    body = f"input %x: f32[3,3] (x=R) %y: f32[3,3] (x=R) = permute(%x, dims={dims}) return %y"
    with pytest.raises(mf.ProgramError, match="dims is a permutation, which names each dim once"):
        alone(body, x=numbers(3, 3))


# -- empty, and numbers --------------------------------------------------------------------------


def test_empty_tensors() -> None:
    x = torch.empty(0, 3)
    check("add(%x, 1.0)", x + 1, x=x)
    check("sum(%x, dims=[0])", x.sum(0), x=x)
    check("sum(%x, dims=[1])", x.sum(1), x=x)
    check("all(%x, dims=[0])", x.all(0), x=x)
    check("mean(%x, dims=[0])", x.mean(0), x=x)
    check("matmul(%w, %x)", torch.zeros(2, 3), w=torch.empty(2, 0), x=x)
    with pytest.raises((RuntimeError, IndexError)):
        alone("input %x: f32[0,3] (x=R) %y: f32[3] (x=R) = max(%x, dims=[0]) return %y", x=x)


def test_numbers() -> None:
    """Arithmetic on numbers of the host, and on a loop index."""
    body = """
      input %x: f32[2] (x=R)
      input %s: f32 scalar
      %t: f32 scalar = mul(%s, 2.0)
      %y: f32[2] (x=R) = mul(%x, %t)
      for %i in 0..3 {
        %k: i64 scalar = mul(%i, 10)
        %y = add(%y, %k)
      }
      return %y"""
    for seed in SEEDS:
        (got,) = alone(body, seed, x=numbers(2), s=0.5)
        assert got.tolist() == [30, 31]
