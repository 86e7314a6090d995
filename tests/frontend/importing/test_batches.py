"""Batches and heads that a module joins stay apart: heads stay split, and nothing is posted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

TP = DeviceMesh.arange(tp=2)
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Heads(nn.Module):
    """Attention of four heads, whose batches and heads are one dim."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.call = call
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            f(x).view(b, s, 4, 2).transpose(1, 2).reshape(b * 4, s, 2)
            for f in (self.query, self.key, self.value)
        )
        y = self.call(q, k.transpose(1, 2), v)
        return self.out(y.view(b, 4, s, 2).transpose(1, 2).reshape(b, s, 8))


BIAS = torch.randn(12, 1, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
CALLS: dict[str, Callable[..., Tensor]] = {
    "bmm": lambda q, k, v: torch.bmm(torch.bmm(q * 0.5, k).softmax(-1), v),
    "of rows": lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k) / 2, 1), v),
    "baddbmm": lambda q, k, v: BIAS.baddbmm(q, k, beta=0.5, alpha=2.0).softmax(2) @ v,
    "masked": lambda q, k, v: torch.bmm(
        torch.bmm(q, k).masked_fill(BIAS > 0.5, -9.0).softmax(-1) + 1, v
    ),
    "one matrix": lambda q, k, v: torch.bmm(
        (torch.bmm(q, k) + BIAS[:1]).to(torch.float32).softmax(-1).to(torch.float64), v - v * 0.5
    ),
    "of batches": lambda q, k, v: torch.bmm(torch.bmm(q, k).softmax(0), v),
}


@pytest.mark.parametrize("name", CALLS)
def test_heads_stay_split(name: str) -> None:
    module = Heads(CALLS[name]).double()
    layouts: dict[str, Any] = {f"{x}.*": {"tp": Shard(0)} for x in ("query", "key", "value")}
    layouts["out.weight"] = {"tp": Shard(1)}
    model = mf.from_torch(module, (X,), mesh=TP, layouts=layouts)
    program = model.compile()
    if name != "of batches":
        assert [c.kind for c in program.communications] == ["Allreduce"]
    (found,) = mf.simulate(program, [*model.load(), X]).outputs
    rounding = {"rtol": 1e-6, "atol": 1e-7} if name == "one matrix" else {}
    torch.testing.assert_close(found, module(X).detach(), **rounding)


def test_attention_with_its_weights() -> None:
    """`nn.MultiheadAttention` as it is called by default: the weights are means over all heads."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 4, batch_first=True).double()
    model = mf.from_torch(
        module, (X, X, X), mesh=TP, blocks={"in_proj_*": 3},
        layouts={"in_proj_*": {"tp": Shard(0)}, "out_proj.weight": {"tp": Shard(1)}},
    )  # fmt: skip
    program = model.compile()
    assert Counter(c.kind for c in program.communications) == {"Allreduce": 2}
    found = model.outputs(mf.simulate(program, [*model.load(), X, X, X]).outputs)
    for x, y in zip(found, module(X, X, X), strict=True):
        torch.testing.assert_close(x, y.detach())
