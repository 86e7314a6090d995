"""What modules write in place: intermediate values, buffers; arguments are left alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, Shard

TP = DeviceMesh.arange(tp=2)
X = torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()


class InPlace(nn.Module):
    """Parts of an intermediate value are written, through views too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        z = y.view(2, 2, 6)
        z.add_(1)
        F.relu(y, inplace=True)
        y[0] = 3.0
        y[:, 1:3] *= 2
        y[-1, 4:] = x[1, 0]
        y[2:3].zero_()
        y[1::2, ::4] = 5.0
        y[:, 1::3] *= x[:, :2]
        y[::2] = y[1::2] * 0.5
        return y, z


@pytest.mark.parametrize("split", [{}, {"tp": Shard(0)}, {"tp": Shard(1)}])
def test_intermediate_values(split: Any) -> None:
    model = mf.from_torch(InPlace(), (X,), mesh=TP, layouts={"input:x": split})
    found = mf.simulate(model.compile(), [X]).outputs
    for x, y in zip(found, InPlace()(X), strict=True):
        torch.testing.assert_close(x, y)


class AddedTo(nn.Module):
    """Parameters are added in place to what has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.ones(6, dtype=torch.float64)) for _ in range(2))

    @torch.no_grad()
    def made(self, x: Tensor) -> Tensor:
        return (x * self.w).cumsum(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.made(x)
        y += self.w
        z = (x * self.v).t().detach()
        z[:, 1:].mul_(self.v[:, None])
        return y * z.t()


@pytest.mark.parametrize("split", [{}, {"tp": Shard(0)}])
def test_what_is_added_to_a_detached_value_gets_its_gradient(split: Any) -> None:
    module = AddedTo()
    model = mf.from_torch(module, (X,), mesh=TP, layouts={"w": split, "v": split})
    step = model.training_step(lambda y: (y * y).sum(), optimizer=partial(mf.optim.sgd, lr=1.0))
    weights = model.load()
    given = step.arguments(weights, step.state(weights), X)
    state = step.updated(mf.simulate(step.compile(), given).outputs)
    module(X).square().sum().backward()
    for name, w in module.named_parameters():
        assert w.grad is not None
        torch.testing.assert_close(state[name], (w - w.grad).detach())


class Counting(nn.Module):
    """It keeps a mean of what it has seen, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        self.calls += 1
        return x - self.mean


def test_buffers_are_written_in_place() -> None:
    module = Counting()
    layouts = {"mean": {"tp": Shard(0)}, "input:x": {"tp": Shard(0)}}
    model = mf.from_torch(module, (X,), mesh=TP, layouts=layouts)
    assert {*model.fusion.reuse.values()} == {"mean", "calls"}
    weights, program = model.load(), model.compile()
    for n in range(1, 4):
        outputs = mf.simulate(program, [*weights, X * n]).outputs
        wanted = module(X * n)
        names = dict(zip(model.fusion.outputs, outputs, strict=True))
        state = {model.fusion.reuse[k]: x for k, x in names.items() if k in model.fusion.reuse}
        torch.testing.assert_close(state["mean"], module.mean)
        assert state["calls"] == n
        torch.testing.assert_close(model.outputs(outputs), wanted)
        weights = [state[name] for name in model.fusion.inputs[:2]]


class Normed(nn.Module):
    """Batch normalisation of images, and of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.rows = nn.BatchNorm2d(3), nn.BatchNorm1d(5, affine=False)
        with torch.no_grad():
            self.images.weight.copy_(torch.tensor([1.0, 2.0, 0.5]))
            self.images.running_mean.copy_(torch.tensor([0.5, -1.0, 0.0]))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(self.images(x), inplace=True), self.rows(y)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("axis", ["whole", "batch", "channels"])
def test_batch_norm(training: bool, axis: str) -> None:
    """Statistics are those of the whole batch, wherever it is split, and are state."""
    torch.manual_seed(0)
    x, y = (torch.randn(s, dtype=torch.float64) for s in ((4, 3, 2, 2), (6, 5)))
    module = Normed().double().train(training)
    dims = {"whole": None, "batch": 0, "channels": 1}[axis]
    layouts = {} if dims is None else {"input:*": {"tp": Shard(dims)}}
    model = mf.from_torch(module, (x, y), mesh=TP, layouts=layouts)
    weights = model.load()
    outputs = mf.simulate(model.compile(), [*weights, x, y]).outputs
    for found, wanted in zip(model.outputs(outputs), module(x, y), strict=True):
        torch.testing.assert_close(found, wanted.detach())
    fusion = model.fusion
    state = {fusion.reuse[n]: z for n, z in zip(fusion.outputs, outputs, strict=True)
             if n in fusion.reuse}  # fmt: skip
    kept = dict(module.named_buffers())
    assert {*state} == ({*kept} if training else set())
    for name, found in state.items():
        torch.testing.assert_close(found, kept[name])


def test_gradients_through_batch_norm() -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(s, dtype=torch.float64) for s in ((4, 3, 2, 2), (6, 5)))
    module = Normed().double().train()
    model = mf.from_torch(module, (x, y), mesh=TP, layouts={"input:*": {"tp": Shard(0)}})
    step = model.training_step(
        lambda a, b: (a * a * a).sum() + b.sum(), optimizer=partial(mf.optim.sgd, lr=1.0)
    )
    weights = model.load()
    outputs = mf.simulate(step.compile(), step.arguments(weights, step.state(weights), x, y))
    state = step.updated(outputs.outputs)
    a, b = module(x, y)
    ((a * a * a).sum() + b.sum()).backward()
    for name in ("weight", "bias"):
        w = module.images.get_parameter(name)
        assert w.grad is not None
        torch.testing.assert_close(state[f"images.{name}"], (w - w.grad).detach())
    torch.testing.assert_close(state["images.running_mean"], module.images.running_mean)


class WritesArgument(nn.Module):
    """It changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class WritesParameter(nn.Module):
    """It changes its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.5)
        return x * self.w


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (WritesArgument, r"WritesArgument writes into x\n  test_aten_written.py:\d+   x\.add_"),
        (WritesParameter, r"WritesParameter writes into w\n  test_aten_written.py:\d+ .*w.mul_"),
    ],
)
def test_writes_that_are_refused(kind: type[nn.Module], text: str) -> None:
    with pytest.raises(DefinitionError, match=text):
        mf.from_torch(kind(), (X,), mesh=TP)
