"""Numbers too large for the floats beside them: infinite where torch takes them, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

F = torch.nn.functional


def _of(x: Any) -> Any:
    return torch if isinstance(x, torch.Tensor) else mf.ops


CASES: dict[str, Callable[[Any, float], Any]] = {
    "full": lambda x, n: _of(x).full((3,), n, dtype=x.dtype) + x,
    "full_like": lambda x, n: torch.full_like(x, n) + x,
    "where": lambda x, n: torch.where(x > 0, x, n), "clamp": lambda x, n: x.clamp(-n, n),
    "clamp from below": lambda x, n: x.clamp(min=n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "add": lambda x, n: n + x, "sub": lambda x, n: x - n, "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n, "divided": lambda x, n: n / x, "pow": lambda x, n: x**n,
    "to a power": lambda x, n: n**x, "gt": lambda x, n: (x > n).to(x.dtype),
    "eq": lambda x, n: (x == n).to(x.dtype), "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "threshold": lambda x, n: F.threshold(x, 0.0, n),
    "above": lambda x, n: F.threshold(x, n, 0.0), "fmod": lambda x, n: torch.fmod(x, n),
    "nan_to_num": lambda x, n: (x / 0).nan_to_num(n, n, -n),
    "nan_to_num of each": lambda x, n: ((x - 1) / 0).nan_to_num(float("inf"), 1.0, -n),
    "xlogy": lambda x, n: torch.xlogy(x, n), "copysign": lambda x, n: torch.copysign(x, -n),
    "hardtanh": lambda x, n: F.hardtanh(x, -n, n), "leaky_relu": lambda x, n: F.leaky_relu(x, n),
    "hardshrink": lambda x, n: F.hardshrink(x, n), "softshrink": lambda x, n: F.softshrink(x, n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n), "lerp": lambda x, n: torch.lerp(x, x + 1, n),
    "index_fill": lambda x, n: x.index_fill(0, _of(x).tensor([0, 1]), n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "addmm": lambda x, n: torch.addmm(x, x[None], x[:, None] * x, beta=n),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_large_numbers(name: str, dtype: torch.dtype) -> None:
    f, x = CASES[name], torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    for number in (1e300, 7e4):
        with mf.FusionDefinition("large") as fd:
            h = fd.define_tensor([3], dtype, DeviceMesh.arange(x=2), {"x": Shard(0)})
            try:
                expected = f(x, number)
            except RuntimeError:  # torch refuses it
                with pytest.raises(mf.DefinitionError, match=r"without overflow|range") as raised:
                    f(h, number)
                assert "test_pointwise_large.py" in str(raised.value)
                continue
            fd.add_output(f(h, number))
        (found,) = mf.simulate(mf.compile(fd), [x]).outputs
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.0, equal_nan=True)
