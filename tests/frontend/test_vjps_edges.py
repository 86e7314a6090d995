"""Values and first gradients of nothing, and of what is not finite, beside torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import sampling

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

from .test_vjps_special import INF, NAN, ROUGH, by_mdfuse, by_torch

F = torch.nn.functional


def compare(
    f: Callable[..., Any], xs: list[torch.Tensor], ranks: int, dim: int = 0, rough: float = 1e-6
) -> None:
    """Compare a function's value and its gradients with torch's, a dim being split."""
    ct, *expected = by_torch(f, xs)
    for ours, theirs in zip(by_mdfuse(f, xs, ct, ranks, dim), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rough, atol=rough / 16, equal_nan=True)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_logarithms_of_sums_of_no_row(rows: int, ranks: int) -> None:
    """Without elements it is -inf; a rank without elements leaves the others' result as it is."""
    x = torch.randn(rows, 4)
    for split in (0, 1):
        compare(lambda x: x.logsumexp(0), [x], ranks, split)
        compare(lambda x: x.logsumexp((0, 1), keepdim=True), [x], ranks, split)


DTYPES = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
NARROW = (torch.float16, torch.bfloat16)


def compare_in(
    dtype: torch.dtype, f: Callable[..., Any], rows: Any, split: int, ranks: int = 2
) -> None:
    """Compare with torch; in 16 bits with the same numbers in f32, rounded once."""
    x = torch.tensor(rows).to(dtype)
    ct, *expected = by_torch(f, [x.float() if dtype in NARROW else x])
    rough = ROUGH[dtype]
    for ours, theirs in zip(by_mdfuse(f, [x], ct.to(dtype), ranks, split), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(
            ours, theirs.to(dtype), rtol=rough, atol=rough / 16, equal_nan=True
        )


#: No zero, one, several; beside numbers that are not finite.
FACTORS = [
    [2.0, 3.0, 4.0], [0.0, 3.0, 4.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.0], [INF, 2.0, 3.0],
    [INF, 0.0, 0.0], [3.0, 0.0, -INF], [NAN, 0.0, 2.0], [0.0, NAN, 0.0], [-0.0, 0.0, NAN],
    [NAN, 2.0, 3.0], [1e-40, -2.0, 2.0], [INF, INF, 0.0], [INF, -INF, 1.0],
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[: sampling.of(4, 2)])
@pytest.mark.parametrize("name", ["prod", "cumprod"])
def test_products_of_factors_that_are_0_or_not_finite(name: str, dtype: torch.dtype) -> None:
    for row in FACTORS:
        compare_in(dtype, lambda x: getattr(x, name)(0), row, 0)
        if name == "prod":
            compare_in(dtype, lambda x: x.prod(), row, 0)
    rows = [row for row in FACTORS if row.count(-INF) + row.count(INF) < 2 or 0.0 in row]
    compare_in(dtype, lambda x: getattr(x, name)(1), rows, 0)
    compare_in(dtype, lambda x: getattr(x, name)(0), [*zip(*rows, strict=True)], 0)


NUMBERS = [[1.0, 2.0, INF, 3.0], [1.0, -INF, INF, 2.0], [NAN, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0],
           [5.0, 5.0, 5.0, 5.0]]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", DTYPES[: sampling.of(4, 2)])
@pytest.mark.parametrize("correction", [0, 1, 4, 4.5, 8, 21])
def test_variances(correction: float, dtype: torch.dtype) -> None:
    """Beside what is not finite, and with a correction of as many elements as there are, or more.

    Distances of 1 and 2 from the mean, and none, have their slopes.
    """
    for dim, split, rows in ((0, 0, NUMBERS), (1, 0, NUMBERS), (None, 1, NUMBERS[3:])):
        for name in ("var", "std"):
            compare_in(
                dtype,
                lambda x: getattr(x, name)(dim, correction=correction),  # noqa: B023
                rows,
                split,
            )
    compare_in(dtype, lambda x: x.var(correction=correction), [INF, 1.0, 2.0], 0)
    compare_in(dtype, lambda x: x.var(0), [[1.0, 2.0]], 1)


@pytest.mark.parametrize("dtype", DTYPES[: sampling.of(4, 2)])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, INF])
def test_renorm_leaves_a_nan_alone(p: float, dtype: torch.dtype) -> None:
    rows = [[NAN, 1.0, 2.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [0.25, 0.5, -0.25]]
    for dim, most, split in ((0, 1.0, 0), (1, 1.0, 0), (0, INF, 1), (0, 0.0, 1)):
        compare_in(dtype, lambda x: x.renorm(p, dim, most), rows, split)  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES[: sampling.of(4, 2)])
@pytest.mark.parametrize("limit", [0.1, 0.25, 0.5])
def test_at_limits_and_at_nan(limit: float, dtype: torch.dtype) -> None:
    """On either side of a limit, by as little as there is; by the kernels that torch has."""
    near = torch.tensor([limit, -limit, 1 - limit, 0.0, 1.0], dtype=dtype)
    beyond = [torch.nextafter(near, torch.full_like(near, far)) for far in (INF, -INF)]
    x = torch.cat([near, *beyond, torch.tensor([NAN, INF, -INF, 0.5], dtype=dtype)])[:, None]
    for f in (
        lambda x: F.softshrink(x, limit), lambda x: F.hardshrink(x, limit),
        lambda x: torch.logit(x, limit), torch.logit,
    ):  # fmt: skip
        ct, *expected = by_torch(f, [x])
        for ranks in (1, 2, 3):
            for part, (ours, theirs) in enumerate(
                zip(by_mdfuse(f, [x], ct, ranks), expected, strict=True)
            ):
                # torch's loops in vectors and one at a time differ in the slope at a NaN
                keep = ~x.isnan() if part else x == x
                torch.testing.assert_close(ours[keep], theirs[keep], equal_nan=True)
    for f in (F.softshrink, F.hardshrink, lambda x: torch.logit(x, 0.25)):
        few = torch.tensor([NAN, 0.5], dtype=dtype)
        ct, *expected = by_torch(f, [few])
        for ours, theirs in zip(by_mdfuse(f, [few], ct, 1), expected, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("split", [0, 2])
def test_windows_without_an_element_have_no_gradient(split: int) -> None:
    """Torch writes beyond the end of memory there."""
    mesh = DeviceMesh.arange(x=2)
    for dims in (1, 2, 3):
        pool = getattr(F, f"max_pool{dims}d")
        with mf.FusionDefinition("none") as fd:
            x = fd.define_tensor([2, 1, *[2] * dims], mesh=mesh, layout={"x": Shard(split)})
            with pytest.raises(mf.DefinitionError, match="lies in the padding"):
                mf.grad(pool(x, 2, 1, 1, dilation=3).sum(), [x])
    for n in (3, 4, 5):  # no such window
        compare(lambda x: F.max_pool1d(x, 3, 1, 1, 2), [torch.randn(2, 1, n + 2)], 2, split)
