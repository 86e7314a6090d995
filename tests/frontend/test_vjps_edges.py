"""Values and first gradients of nothing, and of what is not finite, beside torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .test_vjps_special import by_mdfuse, by_torch


def compare(
    f: Callable[..., Any], xs: list[torch.Tensor], ranks: int, dim: int = 0, rough: float = 1e-6
) -> None:
    """Compare a function's value and its gradients with torch's, a dim being split."""
    ct, *expected = by_torch(f, xs)
    for ours, theirs in zip(by_mdfuse(f, xs, ct, ranks, dim), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rough, atol=rough / 16, equal_nan=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_logarithms_of_sums_of_no_row(rows: int, ranks: int) -> None:
    """Of none it is -inf; a rank that has none of some leaves the others' as it is."""
    x = torch.randn(rows, 4)
    for split in (0, 1):
        compare(lambda x: x.logsumexp(0), [x], ranks, split)
        compare(lambda x: x.logsumexp((0, 1), keepdim=True), [x], ranks, split)
