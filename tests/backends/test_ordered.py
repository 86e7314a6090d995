"""Floats as integers of their order, and what a library that compares makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mdfuse.backends.base import flat
from mdfuse.backends.ordered import floats, in_order, keys
from mdfuse.backends.work import DONE
from mdfuse.layouts.call import Call

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keys_have_the_order_of_floats(dtype: torch.dtype) -> None:
    x = torch.tensor([-INF, -3.5, -1.0, -0.0, 0.0, 2.0**-6, 1.0, 96.0, INF]).to(dtype)
    for op in ("max", "min"):
        found = keys(x, op)
        assert bool((found[1:] > found[:-1]).all()) and torch.equal(floats(found).to(dtype), x)
    none = torch.tensor([NAN, -NAN, 1.0]).to(dtype)
    assert keys(none, "max").argmin() == 2 and keys(none, "min").argmax() == 2
    assert floats(keys(none, "max")).isnan().tolist() == [True, True, False]
    assert floats(keys(none, "min")).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_no_number_is_the_extreme(dtype: torch.dtype, op: str) -> None:
    rows = torch.tensor([[1.0, NAN, 3.0, -INF], [2.0, 5.0, -NAN, INF]]).to(dtype)
    other = keys(rows[1], op)

    def build(integer: torch.dtype) -> object:
        def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> object:
            assert srcs[0].dtype == dsts[0].dtype == integer
            (torch.maximum if op == "max" else torch.minimum)(srcs[0], other, out=dsts[0])
            return DONE

        return post

    call = Call(kind="Allreduce", team=(0, 1), rank=0, reduce_op=op)
    into = torch.zeros(2, 2, dtype=dtype).t()
    in_order(build, call, dtype)([rows[0].clone()], [into]).wait()  # type: ignore[arg-type]
    wide = rows.to(torch.float64)
    expected = (wide.amax if op == "max" else wide.amin)(0)
    assert torch.equal(flat(into).to(torch.float64).nan_to_num(7), expected.nan_to_num(7))


def test_one_element_is_bytes_whatever_its_stride() -> None:
    """As a caller may pass it: every second column of a row of two."""
    for dtype in (torch.float32, torch.uint16):
        x = torch.tensor([[1, 2]], dtype=dtype)[:, ::2]
        for part in (x, x[0], x[:, :0], x[0, 0]):
            assert flat(part).view(torch.uint8).numel() == part.nbytes
