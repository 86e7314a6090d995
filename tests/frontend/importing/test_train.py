"""Steps of training through imported models, beside torch's on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_models import MESHES, MODELS, Tiny, imported
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, LayoutError, ProgramError, Shard, TensorSpec
from mdfuse.compiled.imported import ImportedModel
from mdfuse.compiled.training import TrainingStep
from mdfuse.trees import flattened

#: A rate at which one step of descent shows the gradient.
RATE = 1.0


def squares(*results: Any) -> Any:
    """A loss that all results have a part in."""
    total = 0.0
    for n, x in enumerate(results):
        total = total + ((x * x).mean() + x.mean()) * (n + 1)
    return total


def tensors(tree: Any) -> list[Tensor]:
    return [x for _, x in flattened(tree)[0] if isinstance(x, Tensor)]


def one_step(
    step: TrainingStep, model: ImportedModel, *inputs: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """Outputs of a simulated step, and the state afterwards."""
    weights = model.load()
    given = step.arguments(weights, step.state(weights), *inputs)
    outputs = mf.simulate(step.compile(), given).outputs
    shown = len(outputs) - len(step.fusion.reuse)
    return outputs[:shown], step.updated(outputs)


def joined(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """A parameter; of one in blocks, these as one."""
    if name in state:
        return state[name]
    parts = [x for key, x in state.items() if key.rpartition(".")[0] == name]
    dim = next(d for d in range(like.ndim) if parts[0].shape[d] != like.shape[d])
    return torch.cat(parts, dim)


def descended(module: nn.Module, tiny: Tiny, loss: Callable[..., Any]) -> dict[str, Tensor]:
    """What parameters that have a gradient become by a step of torch's."""
    alone = copy.deepcopy(module)
    loss(*tensors(alone(*tiny.args, **tiny.kwargs))).backward()
    return {
        name: (w - RATE * w.grad).detach()
        for name, w in alone.named_parameters()
        if w.grad is not None
    }


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, mesh: str) -> None:
    tiny = MODELS[name]
    module = tiny.module()
    model = imported(name, mesh)
    step = model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=RATE))
    (loss,), state = one_step(step, model, *tensors((tiny.args, tiny.kwargs)))
    with torch.no_grad():
        right = squares(*tensors(module(*tiny.args, **tiny.kwargs)))
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-9)
    wanted = descended(module, tiny, squares)
    for key, w in wanted.items():
        torch.testing.assert_close(joined(state, key, w), w, rtol=1e-5, atol=1e-7)
    assert {key for key in state if {key, key.rpartition(".")[0]}.isdisjoint(wanted)} == set()


def language_loss(logits: Any, labels: Any) -> Any:
    return mf.ops.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_steps_of_adamw_on_a_language_model() -> None:
    """Three steps, with clipping and a rate of each run, are torch's."""
    tiny, (mesh, _) = MODELS["llama"], MESHES["dp=2,tp=2"]
    module = tiny.module()
    model = imported("llama", "dp=2,tp=2")
    labels = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(5))
    step = model.training_step(
        language_loss,
        extra={"labels": TensorSpec((4, 8), torch.int64, mesh, {"dp": Shard(0)})},
        optimizer=partial(mf.optim.adamw, weight_decay=0.1),
        clip=0.5,
    )
    assert step.inputs == ("input_ids", "labels", "lr")
    program, weights = step.compile(), model.load()
    state: dict[str, Any] = step.state(weights)
    adamw = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.1)
    for rate in (0.01, 0.02, 0.005):
        inputs = (*tiny.args, labels, torch.tensor(rate))
        outputs = mf.simulate(program, step.arguments(weights, state, *inputs)).outputs
        loss, norm, state = *outputs[:2], step.updated(outputs)
        alone = F.cross_entropy(module(*tiny.args).logits.flatten(0, 1), labels.flatten())
        adamw.zero_grad()
        alone.backward()
        torch.testing.assert_close(loss, alone.detach(), rtol=1e-6, atol=0)
        wanted = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
    assert state["count"] == 3
    for name, w in module.named_parameters():
        torch.testing.assert_close(state[name], w.detach(), rtol=1e-5, atol=1e-7)


def test_posts_of_a_step_are_those_by_hand() -> None:
    """tp=2: per layer two all-reduces forwards and two backwards; gradients need none."""
    model = imported("llama", "tp=2")
    spec = TensorSpec((4, 8), torch.int64)
    step = model.training_step(
        language_loss, extra={"labels": spec}, optimizer=partial(mf.optim.sgd, lr=RATE)
    )
    posts = step.compile().communications
    large = [c for c in posts if c.shape == (4, 8, 32)]
    assert {c.kind for c in posts} == {"Allreduce"}
    # 1 of the table, 2 per layer, and in the backward 1 of the head, 2 per layer
    assert len(large) == 1 + 2 * 2 + 1 + 2 * 2
    assert max(c.shape[0] for c in posts if c not in large) <= 32  # of the loss, per row


def test_frozen_parameters_stay() -> None:
    tiny = MODELS["llama"]
    module = tiny.module()
    model = imported("llama", "tp=2")
    step = model.training_step(
        squares,
        optimizer=partial(mf.optim.sgd, lr=RATE),
        frozen=("*.mlp.*", "model.embed_tokens.weight"),
    )
    assert not [n for n in step.trained if "mlp" in n or "embed" in n] and len(step.trained) == 14
    _, state = one_step(step, model, *tiny.args)
    assert {*state} == {*step.trained}
    wanted = descended(module, tiny, squares)
    for name in step.trained:
        torch.testing.assert_close(state[name], wanted[name], rtol=1e-5, atol=1e-7)


class Halved(nn.Module):
    """Two layers, of which one result comes from each, and a third that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def test_what_does_not_lead_to_the_loss_is_left_alone() -> None:
    """It has no state, and does not decay, as in torch."""
    module, x = Halved(), torch.randn(4, 6)
    model = mf.from_torch(
        module, (x,), mesh=DeviceMesh.arange(dp=2), layouts={"*": {"dp": Shard(0)}}
    )
    step = model.training_step(
        lambda first, second: first.square().mean() + second.detach().mean(),
        optimizer=partial(mf.optim.adamw, lr=0.1, weight_decay=0.5),
        clip=1.0,
    )
    assert step.trained == ("first.weight", "first.bias")
    (loss, norm), state = one_step(step, model, x)
    assert {key for key in state if not key.startswith("first.")} == {"count"}
    optimizer = torch.optim.AdamW(module.parameters(), 0.1, weight_decay=0.5)
    first, second = module(x)
    alone = first.square().mean() + second.detach().mean()
    alone.backward()
    wanted = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    torch.testing.assert_close((loss, norm), (alone.detach(), wanted))
    for name in step.trained:
        torch.testing.assert_close(state[name], module.get_parameter(name).detach())


class Adapted(nn.Module):
    """A matrix that is frozen, with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 4).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapters_beside_what_requires_no_gradient() -> None:
    torch.manual_seed(2)
    module, x = Adapted().double(), torch.randn(4, 6, dtype=torch.float64)
    layouts = {"base.*": {"tp": Shard(0)}, "up.weight": {"tp": Shard(0)}}
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2), layouts=layouts)
    step = model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=RATE))
    assert step.trained == ("down.weight", "up.weight")
    _, state = one_step(step, model, x)
    squares(module(x)).backward()
    for name in step.trained:
        w = module.get_parameter(name)
        assert w.grad is not None
        torch.testing.assert_close(state[name], (w - w.grad).detach())


TABLES: dict[str, dict[str, Any]] = {
    "padding": {"padding_idx": 0},
    "by frequency": {"scale_grad_by_freq": True},
    "both": {"padding_idx": 3, "scale_grad_by_freq": True},
}


@pytest.mark.parametrize("split", [{}, {"weight": {"tp": Shard(0)}}, {"input:0": {"tp": Shard(0)}}])
@pytest.mark.parametrize("said", TABLES)
def test_what_a_table_says_of_its_gradients_holds(said: str, split: Any) -> None:
    torch.manual_seed(2)
    module, ids = (
        nn.Embedding(8, 4, **TABLES[said]).double(),
        torch.tensor([[0, 3, 0, 3], [7, 0, 3, 2]]),
    )
    model = mf.from_torch(module, (ids,), mesh=DeviceMesh.arange(tp=2), layouts=split)
    step = model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=RATE))
    _, state = one_step(step, model, ids)
    squares(module(ids)).backward()
    w = module.weight
    assert w.grad is not None
    torch.testing.assert_close(state["weight"], (w - w.grad).detach())


@pytest.mark.parametrize("said", TABLES)
def test_it_holds_under_the_autograd_of_torch(said: str) -> None:
    torch.manual_seed(2)
    module, ids = (
        nn.Embedding(8, 4, **TABLES[said]).double(),
        torch.tensor([[0, 3, 0, 3], [7, 0, 3, 2]]),
    )
    model = mf.from_torch(module, (ids,), mesh=DeviceMesh([0]))
    w = nn.Parameter(module.weight.detach().clone())
    (y,) = mf.differentiable(model.definition)(w, ids)
    for rows in (y, module(ids)):
        squares(rows).backward()
    torch.testing.assert_close(w.grad, module.weight.grad)


class Rounded(torch.autograd.Function):
    """Whole numbers, through which gradients go as if they were not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().round()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return given[0]


class Straight(nn.Module):
    """A function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(self.linear(x))


def test_a_backward_of_its_own_is_told() -> None:
    """Here there is no gradient at all: what the forward computes leads nowhere."""
    module, x = Straight().double(), torch.randn(3, 4, dtype=torch.float64)
    called = torch.autograd.Function.apply
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2))
    assert called == torch.autograd.Function.apply
    told = [line for line in model.report().splitlines() if "warning" in line]
    assert told == ["  warning: the backward of Rounded is not captured: "
                    "gradients are those of its forward"]  # fmt: skip
    with pytest.raises(DefinitionError, match="no parameter leads to the loss"):
        model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=RATE))


class Guarded(nn.Module):
    """Something of it is computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.linear(x).abs().amax(-1, keepdim=True)
        return self.linear(x) / scale


def test_what_stands_under_no_grad_is_constant() -> None:
    torch.manual_seed(2)
    module, x = Guarded().double(), torch.randn(3, 4, dtype=torch.float64)
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2))
    step = model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=RATE))
    _, state = one_step(step, model, x)
    squares(module(x)).backward()
    w = module.linear.weight
    assert w.grad is not None
    torch.testing.assert_close(state["linear.weight"], (w - w.grad).detach())


def test_masters_of_narrow_parameters() -> None:
    """Steps that bf16 loses add up in f32."""
    module = nn.Linear(4, 2, bias=False).to(torch.bfloat16)
    nn.init.ones_(module.weight)
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2))
    step = model.training_step(
        lambda y: y.float().mean(), optimizer=partial(mf.optim.sgd, lr=2**-9), master=True
    )
    weights, program = model.load(), step.compile()
    state: dict[str, Any] = step.state(weights)
    for _ in range(4):
        outputs = mf.simulate(program, step.arguments(weights, state, x)).outputs
        state = step.updated(outputs)
    slope = 0.5  # of the mean over two outputs
    wanted = torch.full((2, 4), 1 - 4 * slope * 2**-9)
    assert torch.equal(state["weight.master"], wanted)
    assert torch.equal(state["weight"], wanted.to(torch.bfloat16))


def test_a_step_that_runs() -> None:
    """On the one rank of this process, with its state written in place, saved and loaded."""
    module, x = nn.Linear(4, 2), torch.randn(3, 4)
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=1))
    step = model.training_step(squares, optimizer=mf.optim.adamw)
    running = step.start(model.load(rank=0))
    losses = [float(running(x, torch.tensor(0.05))) for _ in range(20)]
    assert losses[-1] < losses[0] and running.state["count"] == 20
    adamw = torch.optim.AdamW(module.parameters(), lr=0.05)
    for loss in losses:
        adamw.zero_grad()
        alone = squares(module(x))
        alone.backward()
        adamw.step()
        assert abs(float(alone.detach()) - loss) < 1e-5


class Dropped(nn.Module):
    """Dropout, alone and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = F.dropout(x, 0.25, self.training) * self.scale
        second = F.dropout(x, 0.25, self.training)
        return first, second, F.scaled_dot_product_attention(q, q, q, dropout_p=0.5 * self.training)


def test_dropout_draws_by_a_seed_of_the_run() -> None:
    x, q = torch.ones(64, 64), torch.randn(2, 2, 8, 4)
    mesh = DeviceMesh.arange(dp=2)
    layouts = {"input:0": {"dp": Shard(0)}}
    model = mf.from_torch(Dropped().train(), (x, q), mesh=mesh, layouts=layouts)
    program = model.compile()
    assert model.fusion.inputs[-1] == "seed"

    def draw(seed: int) -> list[Tensor]:
        return mf.simulate(program, [*model.load(), x, q, seed]).outputs

    first, second, _ = draw(1)
    torch.testing.assert_close(first.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(float((first == 0).float().mean()) - 0.25) < 0.03
    assert not torch.equal(first, second) and torch.equal(draw(1)[0], first)
    assert not torch.equal(draw(2)[0], first)
    # the mean over many seeds of attention with dropout is attention without
    mean = torch.stack([draw(seed)[2] for seed in range(300)]).mean(0)
    torch.testing.assert_close(mean, F.scaled_dot_product_attention(q, q, q), atol=0.25, rtol=0.25)
    calm = mf.from_torch(Dropped().eval(), (x, q), mesh=mesh, layouts=layouts)
    assert "seed" not in calm.fusion.inputs
    assert torch.equal(mf.simulate(calm.compile(), [*calm.load(), x, q]).outputs[1], x)


class WithLoss(nn.Module):
    """A module that returns its loss by name, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"loss": F.mse_loss(y, target), "y": y}


def test_the_loss_of_the_module() -> None:
    torch.manual_seed(2)
    module, x, target = WithLoss(), torch.randn(3, 4), torch.randn(3, 2)
    model = mf.from_torch(module, (x,), {"target": target}, mesh=DeviceMesh.arange(tp=2))
    step = model.training_step(optimizer=partial(mf.optim.sgd, lr=RATE))
    (loss,), state = one_step(step, model, x, target)
    alone = module(x, target)["loss"]
    alone.backward()
    w = module.linear.weight
    assert w.grad is not None
    torch.testing.assert_close(loss, alone.detach())
    torch.testing.assert_close(state["linear.weight"], (w - w.grad).detach())


# -- what is wrong ---------------------------------------------------------------------------------


def small() -> ImportedModel:
    return mf.from_torch(nn.Linear(4, 2), (torch.ones(3, 4),), mesh=DeviceMesh.arange(tp=2))


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ({"optimizer": 3}, DefinitionError, "an optimizer is a function"),
        ({"optimizer": torch.optim.SGD}, DefinitionError, "an optimizer is a function"),
        ({"frozen": "*.wieght"}, LayoutError, r"frozen\['\*.wieght'\] matches nothing"),
        ({"frozen": "*"}, DefinitionError, "nothing to train"),
        ({"loss": lambda y: y}, DefinitionError, "a loss is a floating tensor without dims"),
        ({"loss": None}, DefinitionError, "the module returns no loss|a loss is a floating"),
        ({"loss": lambda y: 3.0}, DefinitionError, "loss returns 3.0"),
        (
            {"loss": lambda y: y.detach().sum()},
            DefinitionError,
            "no parameter leads to the loss",
        ),
        ({"extra": {"t": torch.ones(3)}}, DefinitionError, r"extra\['t'\] is Tensor"),
        ({"optimizer": lambda w, dw, m: w}, DefinitionError, "returns 1 value for weight"),
    ],
)
def test_refused(said: dict[str, Any], error: type[Exception], text: str) -> None:
    usual = {"loss": squares, "optimizer": partial(mf.optim.sgd, lr=RATE)}
    with pytest.raises(error, match=text):
        small().training_step(**{**usual, **said})


class Overlapping(nn.Module):
    """A parameter that is a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.part = nn.Parameter(self.whole.detach()[:2])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.whole).sum() + (x[:, :2] @ self.part).sum()


def test_parameters_in_one_memory() -> None:
    """They run; trained they would come apart, unless one of them stays."""
    module, x = Overlapping(), torch.randn(3, 4, dtype=torch.float64)
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2))
    (y,) = mf.simulate(model.compile(), [*model.load(), x]).outputs
    torch.testing.assert_close(y, module(x).detach())
    descend = partial(mf.optim.sgd, lr=RATE)
    with pytest.raises(DefinitionError, match="whole and part lie in one memory"):
        model.training_step(lambda y: y, optimizer=descend)
    step = model.training_step(lambda y: y, optimizer=descend, frozen="part")
    assert step.trained == ("whole",)


def test_refused_inputs() -> None:
    model = small()
    step = model.training_step(squares, optimizer=mf.optim.adamw)
    weights = model.load()
    with pytest.raises(ProgramError, match=r"has 2\n  try         pass, in this order: input, lr"):
        step.arguments(weights, step.state(weights), torch.ones(3, 4))
    with pytest.raises(ProgramError, match="the model has 2 parameters and constants"):
        step.state(weights[:1])


def test_refused_outputs() -> None:
    """Some of what a run returned, as of a slice that left the state out."""
    model = small()
    step = model.training_step(squares, optimizer=mf.optim.sgd)
    for read, count in ((model.outputs, 1), (step.updated, 3)):
        for wrong in (count - 1, count + 1):
            with pytest.raises(ProgramError, match=f"a run returns a list of {count} "):
                read([torch.ones(3, 2)] * wrong)
