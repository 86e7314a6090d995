"""Reductions of rows: into a buffer they have the bits that they have by themselves."""

from __future__ import annotations

import pytest
import torch

from mdfuse.layouts.reduction import combine, combine_into

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.complex64, torch.int8, torch.int64, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_have_the_same_bits(dtype: torch.dtype, n: int) -> None:
    """Numbers whose sums are rounded, and wrap; an infinity and a NaN among floats."""
    draw = torch.Generator().manual_seed(n)
    rows = (torch.randn(n, 501, generator=draw) * 100).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        rows[0, :2] = torch.tensor([torch.inf, torch.nan], dtype=dtype)
    into = torch.empty(501, dtype=dtype)
    combine_into("sum", rows, into)
    assert torch.equal(into.view(torch.uint8), combine("sum", rows).view(torch.uint8))


@pytest.mark.parametrize("op", ["prod", "min", "max"])
def test_other_ops(op: str) -> None:
    rows = torch.tensor([[1.0, -4.0], [3.0, 2.0]])
    into = torch.empty(2)
    combine_into(op, rows, into)
    assert into.tolist() == {"prod": [3, -8], "min": [1, -4], "max": [3, 2]}[op]


def test_a_sum_of_two_may_go_over_one_of_them() -> None:
    rows = torch.arange(8, dtype=torch.bfloat16).view(2, 4)
    combine_into("sum", rows, rows[0])
    assert rows[0].tolist() == [4, 6, 8, 10]


@pytest.mark.parametrize(("op", "result"), [("max", [2**64 - 1, 9]), ("min", [3, 8])])
def test_wide_unsigned_integers_have_their_order(op: str, result: list[int]) -> None:
    rows = torch.tensor([[2**64 - 1, 9], [3, 8]], dtype=torch.uint64)
    assert combine(op, rows).tolist() == result


@pytest.mark.parametrize(
    ("op", "result"),
    [("sum", [16.0, 4.0]), ("prod", [64.0, 2.0]), ("avg", [8.0, 2.0]), ("max", [8.0, 2.0]),
     ("min", [8.0, 1.0])],
)  # fmt: skip
def test_powers_of_two(op: str, result: list[float]) -> None:
    """Scales of blocks of narrow floats; what is no power of two is rounded to one."""
    rows = torch.tensor([[8.0, 1.0], [8.0, 2.0]]).to(torch.float8_e8m0fnu)
    assert combine(op, rows).to(torch.float32).tolist() == result


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
def test_complex_numbers_of_halves(op: str) -> None:
    rows = torch.tensor([[1 + 2j, -1j, 0.5], [2 - 1j, 3 + 1j, 1j]])
    got = combine(op, rows.to(torch.complex32)).to(torch.complex64)
    assert torch.equal(got, {"sum": rows.sum(0), "prod": rows.prod(0), "avg": rows.mean(0)}[op])
