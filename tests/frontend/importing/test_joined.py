"""Parameters in blocks: kept apart as long as a rule takes them, else one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

TP = DeviceMesh.arange(tp=2)
X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))


class Fused(nn.Module):
    """One matrix of several blocks, and what is made of the product."""

    def __init__(self, sizes: tuple[int, ...], call: Callable[..., Any], bias: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.call = call
        self.linear = nn.Linear(6, sum(sizes), bias=bias)

    def forward(self, x: Tensor) -> Any:
        return self.call(self.linear(x), self.linear.weight)


APART: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "split": ((4, 4, 4), lambda y, w: y.split(4, -1)),
    "sizes": ((8, 4, 4), lambda y, w: [z.exp() for z in y.split([8, 4, 4], dim=2)]),
    "chunk": ((4, 4), lambda y, w: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]),
    "slices": ((8, 4, 4), lambda y, w: (y[..., :8], y[..., 8:12], y[..., 12:])),
    "two of three": ((4, 4, 4), lambda y, w: y[..., 4:].split(4, -1)),
    "keys with values": ((4, 4, 4), lambda y, w: y.split([4, 8], -1)[1].split(4, -1)),
    "queries beside them": ((4, 4, 4), lambda y, w: y.split([4, 8], -1)[0].exp()),
    "unflatten": ((4, 4), lambda y, w: y.unflatten(-1, (2, 4)).unbind(0)[0].select(1, 1)),
    "view": ((4, 4), lambda y, w: y.view(3, 4, 2, 4).permute(2, 0, 1, 3)[1]),
    "rows": ((4, 4), lambda y, w: y.reshape(-1, 8).split(4, 1)),
    "transposed": ((4, 4), lambda y, w: y.transpose(1, 2).split(4, 1)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", APART)
def test_blocks_stay_apart(name: str, bias: bool) -> None:
    sizes, call = APART[name]
    module = Fused(sizes, call, bias)
    model = mf.from_torch(
        module, (X,), mesh=TP, layouts={"linear.*": {"tp": Shard(0)}}, blocks={"linear.*": sizes}
    )
    program = model.compile()
    assert not program.communications
    inputs = [n for n in model.fusion.inputs if n.startswith("linear.weight")]
    assert inputs == [f"linear.weight.{i}" for i in range(len(sizes))]
    found = model.outputs(mf.simulate(program, [*model.load(), X]).outputs)
    wanted = module(X)
    pairs = [(found, wanted)] if isinstance(wanted, Tensor) else zip(found, wanted, strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x, y.detach())


@pytest.mark.parametrize(
    "call",
    [
        lambda y, w: y.exp(),
        lambda y, w: y.split([3, 5], -1)[1],
        lambda y, w: y[..., 2:6],
        lambda y, w: y + w.sum(1),
        lambda y, w: y.view(3, 4, 4, 2)[..., 0],
        lambda y, w: F.linear(y, w.T),
        lambda y, w: y.flatten(1),
        lambda y, w: y,
    ],
)
def test_what_no_rule_takes_is_one(call: Any) -> None:
    module = Fused((4, 4), call, True)
    model = mf.from_torch(
        module, (X,), mesh=TP, layouts={"linear.*": {"tp": Shard(0)}}, blocks={"linear.*": 2}
    )
    (found,) = mf.simulate(model.compile(), [*model.load(), X]).outputs
    torch.testing.assert_close(found, module(X).detach())


class Transposed(nn.Module):
    """A parameter that is multiplied from the left, and its bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w, self.b = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        first = torch.addmm(self.b, x.view(-1, 6), self.w).view(3, 4, 8).split(4, -1)
        return *first, *(x @ self.w).split(4, 2)


def test_products_with_columns_in_blocks() -> None:
    module = Transposed()
    layouts = {"w": {"tp": Shard(1)}, "b": {"tp": Shard(0)}}
    model = mf.from_torch(module, (X,), mesh=TP, layouts=layouts, blocks={"*": 2})
    program = model.compile()
    assert not program.communications
    for x, y in zip(mf.simulate(program, [*model.load(), X]).outputs, module(X), strict=True):
        torch.testing.assert_close(x, y.detach())
