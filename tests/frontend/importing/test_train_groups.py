"""Groups of parameters, averages, and steps that are skipped, beside torch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, LayoutError, Shard
from mdfuse.compiled.imported import ImportedModel
from mdfuse.compiled.training import TrainingStep

SPLIT = {"dp": Shard(0)}
PLACES: dict[str, dict[str, Any]] = {
    "whole": {"layouts": {"input:0": SPLIT}},
    "sharded": {"layouts": {"*": SPLIT, "input:0": SPLIT}, "gather": "dp"},
}


def network(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2)).to(dtype)
    return module, torch.randn(6, 3).to(dtype), torch.randn(6, 2).to(dtype)


def step_of(place: str, optimizer: Any, dtype: torch.dtype = torch.float64, **how: Any) -> Any:
    module, x, target = network(dtype)
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(dp=2), **PLACES[place])
    step = model.training_step(
        lambda y, target: mf.ops.mse_loss(y, target),
        optimizer=optimizer,
        extra={"target": mf.TensorSpec((6, 2), dtype, layout=SPLIT)},
        **how,
    )
    return model, step, module, x, target


def trained(
    model: ImportedModel, step: TrainingStep, batches: list[tuple[Any, ...]]
) -> tuple[dict[str, Any], list[list[Any]]]:
    """State after some steps, and what each returned."""
    weights, program = model.load(), step.compile()
    state, shown = step.state(weights), []
    for batch in batches:
        outputs = mf.simulate(program, step.arguments(weights, state, *batch)).outputs
        state = step.updated(outputs)
        shown.append(outputs[: len(outputs) - len(step.fusion.reuse)])
    return state, shown


def by_torch(
    module: nn.Module,
    groups: Callable[[nn.Module], list[dict[str, Any]]],
    batches: list[tuple[Tensor, Tensor]],
    each: Callable[[], Any] = lambda: None,
    of: Any = torch.optim.AdamW,
) -> None:
    optimizer = of(groups(module))
    for x, target in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), target).backward()
        optimizer.step()
        each()


def check(state: Mapping[str, Any], module: nn.Module) -> None:
    for name, w in module.named_parameters():
        torch.testing.assert_close(state[name], w.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("place", PLACES)
def test_groups_of_parameters(place: str) -> None:
    """No decay of biases and norms; another rate, which a run chooses, for the norm."""
    optimizer = mf.optim.groups(
        partial(mf.optim.adamw, weight_decay=0.3),
        {"*.bias": {"weight_decay": 0.0}, "1.wei*": {"weight_decay": 0.0, "lr": "lr_norm"},
         "2.bias": {"weight_decay": 0.2, "lr": 0.5}, "1.*": {"weight_decay": 0.0},
         "[1].b*s": {"weight_decay": 0.0}},
    )  # fmt: skip
    model, step, module, x, target = step_of(place, optimizer)
    assert step.inputs == ("input", "target", "lr", "lr_norm")
    rates = [torch.tensor(r) for r in (0.01, 0.07)]
    state, _ = trained(model, step, [(x, target, *rates)] * 3)

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        w = dict(m.named_parameters())
        lr, norm = (float(r) for r in rates)
        return [
            {"params": [w["0.weight"], w["2.weight"]], "lr": lr, "weight_decay": 0.3},
            {"params": [w["0.bias"], w["1.bias"]], "lr": lr, "weight_decay": 0.0},
            {"params": [w["1.weight"]], "lr": norm, "weight_decay": 0.0},
            {"params": [w["2.bias"]], "lr": 0.5, "weight_decay": 0.2},
        ]

    by_torch(module, groups, [(x, target)] * 3)
    check(state, module)


def test_groups_with_momentum() -> None:
    optimizer = mf.optim.groups(
        partial(mf.optim.sgd, lr=0.1, momentum=0.9), {"0.*": {"lr": 0.02, "nesterov": True}}
    )
    model, step, module, x, target = step_of("whole", optimizer)
    state, _ = trained(model, step, [(x, target)] * 3)

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        w, how = dict(m.named_parameters()), {"momentum": 0.9}
        return [
            {
                "params": [x for n, x in w.items() if n[0] == "0"],
                "lr": 0.02,
                "nesterov": True,
                **how,
            },
            {"params": [x for n, x in w.items() if n[0] != "0"], "lr": 0.1, **how},
        ]

    by_torch(module, groups, [(x, target)] * 3, of=torch.optim.SGD)
    check(state, module)


def test_groups_that_cannot_be() -> None:
    with pytest.raises(LayoutError, match=r"groups\['\*\.nothing'\] matches nothing"):
        step_of("whole", mf.optim.groups(mf.optim.adamw, {"*.nothing": {"lr": 1.0}}))
    alike = mf.optim.groups(mf.optim.adamw, {"0.*": {"lr": 1.0}, "*.b*": {"lr": 2.0}})
    with pytest.raises(LayoutError, match=r"groups, lr: '0\.\*' and '\*\.b\*' both match 0\.bias"):
        step_of("whole", alike)
    with pytest.raises(DefinitionError, match="groups\\['a'\\] has rate"):
        mf.optim.groups(mf.optim.adamw, {"a": {"rate": 1.0}})
    wrong: Any = "adamw"
    with pytest.raises(DefinitionError, match="other numbers for parameters"):
        mf.optim.groups(wrong, {})


@pytest.mark.parametrize(
    "inner", [mf.optim.adamw, mf.optim.sgd, partial(mf.optim.sgd, momentum=0.5)]
)
@pytest.mark.parametrize("place", PLACES)
def test_averages_are_those_of_torch(place: str, inner: Any) -> None:
    kwargs = inner.keywords if isinstance(inner, partial) else {}
    optimizer = mf.optim.averaged(partial(inner, lr=0.05), decay=0.7)
    model, step, module, x, target = step_of(place, optimizer)
    state, _ = trained(model, step, [(x, target)] * 4)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    adam = inner is mf.optim.adamw
    by_torch(
        module, lambda m: [{"params": [*m.parameters()], "lr": 0.05, **kwargs}], [(x, target)] * 4,
        lambda: average.update_parameters(module), torch.optim.AdamW if adam else torch.optim.SGD,
    )  # fmt: skip
    check(state, module)
    for name, w in average.module.named_parameters():
        torch.testing.assert_close(state[f"{name}.average"], w.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_averages_of_groups_are_those_of_torch(place: str, is_inside: bool) -> None:
    adamw, numbers = partial(mf.optim.adamw, lr=0.05), {"*.bias": {"lr": 0.2}}
    if is_inside:
        optimizer = mf.optim.averaged(mf.optim.groups(adamw, numbers), decay=0.7)
    else:
        optimizer = mf.optim.groups(mf.optim.averaged(adamw, decay=0.7), numbers)
    model, step, module, x, target = step_of(place, optimizer)
    state, _ = trained(model, step, [(x, target)] * 4)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        rates = ((name, w, 0.2 if "bias" in name else 0.05) for name, w in m.named_parameters())
        return [{"params": [w], "lr": lr} for _, w, lr in rates]

    by_torch(module, groups, [(x, target)] * 4, lambda: average.update_parameters(module))
    check(state, module)
    for name, w in average.module.named_parameters():
        torch.testing.assert_close(state[f"{name}.average"], w.detach(), rtol=1e-9, atol=1e-12)


def test_averages_of_16_bits_are_those_of_masters() -> None:
    optimizer = mf.optim.averaged(partial(mf.optim.sgd, lr=0.05), decay=0.9)
    model, step, _, x, target = step_of("sharded", optimizer, torch.bfloat16, master=True)
    state, _ = trained(model, step, [(x, target)] * 2)
    assert state["0.weight.average"].dtype == torch.float32
    wrong: Any = 2
    with pytest.raises(DefinitionError, match="decay=2"):
        mf.optim.averaged(mf.optim.sgd, wrong)
    with pytest.raises(DefinitionError, match="averaged\\(2\\)"):
        mf.optim.averaged(wrong)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_is_not_finite_changes_nothing(
    place: str, bad: float, clip: float | None
) -> None:
    """On one rank alone a row is bad; both ranks skip, and the step after is as if it never was."""
    optimizer = mf.optim.averaged(partial(mf.optim.adamw, lr=0.05), 0.5)
    model, step, _, x, target = step_of(place, optimizer, skip_nonfinite=True, clip=clip)
    broken = x.clone()
    broken[5, 1] = bad
    state, shown = trained(model, step, [(x, target), (broken, target), (x, target)])
    expected, usual = trained(model, step, [(x, target), (x, target)])
    assert [bool(outputs[-1]) for outputs in shown] == [False, True, False]
    assert [bool(outputs[-1]) for outputs in usual] == [False, False]
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    first, _ = trained(model, step, [(broken, target)])
    assert float(first["count"]) == 0
    assert torch.equal(first["0.weight"], model.load()[0])


def test_large_gradients_are_finite() -> None:
    """Their squares are not."""
    module = nn.Linear(2, 2, bias=False)
    x = torch.full((2, 2), 1e30)
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(dp=2))
    step = model.training_step(
        lambda y: y.sum(), optimizer=partial(mf.optim.sgd, lr=1e-30), skip_nonfinite=True
    )
    state, shown = trained(model, step, [(x,)])
    assert not bool(shown[0][-1])
    torch.testing.assert_close(state["weight"], module.weight.detach() - 2.0)


def test_masters_and_moments_stay_in_16_bits() -> None:
    optimizer = partial(mf.optim.adamw, lr=0.05)
    model, step, _, x, target = step_of(
        "sharded", optimizer, torch.bfloat16, master=True, skip_nonfinite=True
    )
    before, _ = trained(model, step, [(x, target)])
    after, _ = trained(model, step, [(x, target), (copy.deepcopy(x) * math.nan, target)])
    assert all(torch.equal(before[name], value) for name, value in after.items())
