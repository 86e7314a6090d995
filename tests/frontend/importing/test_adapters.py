"""Low-rank adapters beside frozen matrices: equal to the module with them in torch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from helpers.tiny_models import MESHES, MODELS, Tiny
from torch import Tensor, nn
from torch.nn import functional as F

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, LayoutError, Shard

#: model -> which of its layers have adapters.
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"*.q_proj": 4, "*.o_proj": (3, 6), "*.down_proj": 2},
    "gpt2": {"*.c_attn": 4, "*.c_proj": (2, 1.0)},
}
RATE = 0.5


class Beside(nn.Module):
    """A layer with an adapter, as one writes it in torch."""

    def __init__(self, layer: nn.Module, first: Tensor, second: Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.lora_A, self.lora_B = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)
        return y


def with_numbers(model: Any) -> dict[str, Tensor]:
    """A checkpoint: the module's parameters, and matrices of adapters that are drawn."""
    found = {p.name: p.tensor.detach() for p in model.model.captured.parameters.values()}
    numbers = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(x.shape, generator=numbers, dtype=x.dtype) / 4 if "lora_" in name else x
        for name, x in found.items()
    }


def in_torch(module: nn.Module, kept: dict[str, Tensor], said: dict[str, Any]) -> nn.Module:
    alone = copy.deepcopy(module).requires_grad_(False)
    for name in [n.removesuffix(".lora_A") for n in kept if n.endswith("lora_A")]:
        value = next(x for pattern, x in said.items() if name.endswith(pattern.removeprefix("*")))
        scale = value[1] / value[0] if isinstance(value, tuple) else 1.0
        parent, _, own = name.rpartition(".")
        of = alone.get_submodule(parent)
        adapter = Beside(getattr(of, own), kept[f"{name}.lora_A"], kept[f"{name}.lora_B"], scale)
        setattr(of, own, adapter)
    return alone


def imported(tiny: Tiny, mesh: str, module: nn.Module, adapters: dict[str, Any]) -> Any:
    where, layouts = MESHES[mesh]
    is_tp = "tp" in mesh
    return mf.from_torch(
        module, tiny.args, tiny.kwargs, mesh=where, adapters=adapters,
        layouts={**tiny.layouts(), **layouts} if is_tp else layouts,
        blocks=tiny.blocks if is_tp else {}, gather=() if is_tp else "fsdp",
    )  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ADAPTERS)
def test_forward_and_a_step_are_those_of_torch(name: str, mesh: str) -> None:
    tiny, said = MODELS[name], ADAPTERS[name]
    module = tiny.module()
    before = [*module.state_dict()]
    model = imported(tiny, mesh, module, said)
    assert [*module.state_dict()] == before  # the module is as it was
    kept = with_numbers(model)
    weights, alone = model.load(kept), in_torch(module, kept, said)
    wanted = alone(*tiny.args, **tiny.kwargs).logits
    found = mf.simulate(model.compile(), [*weights, *tiny.args]).outputs
    torch.testing.assert_close(model.outputs(found)["logits"], wanted.detach())

    step = model.training_step(
        lambda logits, *_: (logits * logits).mean(), optimizer=partial(mf.optim.sgd, lr=RATE)
    )
    names = {n for n in kept if "lora_" in n}
    assert step.trained and all("lora_" in n for n in step.trained)
    given = step.arguments(weights, step.state(weights), *tiny.args)
    outputs = mf.simulate(step.compile(), given).outputs
    wanted.pow(2).mean().backward()
    state = step.updated(outputs)
    for key, parameter in alone.named_parameters():
        if "lora_" in key:
            assert parameter.grad is not None
            new = [x for n, x in state.items() if n == key or n.rpartition(".")[0] == key]
            want = parameter.detach() - RATE * parameter.grad
            torch.testing.assert_close(torch.cat(new), want, rtol=1e-6, atol=1e-9)
            names.discard(key)
    assert not names


def test_what_a_forward_posts_besides_is_narrow() -> None:
    """Beside a matrix whose inputs are split, ranks add up as many numbers per row as the rank."""
    tiny = MODELS["llama"]
    plain, adapted = (
        [c.shape[-1] for c in imported(tiny, "tp=2", tiny.module(), said).compile().communications]
        for said in ({}, ADAPTERS["llama"])
    )
    assert sorted(adapted) == sorted([*plain, *[3, 2] * 2])


def test_adapters_begin_as_nothing_and_checkpoints_may_lack_them() -> None:
    with torch.device("meta"):
        empty = nn.Linear(6, 4)
    module, x = nn.Linear(6, 4), torch.randn(3, 6)
    model = mf.from_torch(empty, (x,), mesh=DeviceMesh.arange(tp=2), adapters={"*": 2},
                          layouts={"weight": {"tp": Shard(0)}})  # fmt: skip
    weights = model.load(module.state_dict())
    names = [model.model.captured.parameters[n].name for n in model.model.parameters]
    assert names == ["weight", "bias", "lora_A", "lora_B"]
    (y,) = mf.simulate(model.compile(), [*weights, x]).outputs
    torch.testing.assert_close(y, module(x).detach())
    a, b = weights[2:]
    assert a.abs().max() <= 6**-0.5 and a.std() > 0.1 and not b.any()
    assert torch.equal(model.load(module.state_dict(), rank=1)[2], a)  # alike on all ranks
    assert model.load(module.state_dict(), rank=1)[3].shape == (2, 2)  # as the rows of weight


def test_what_else_is_trained_and_where_adapters_live_can_be_said() -> None:
    module, x = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)), torch.randn(3, 6)
    model = mf.from_torch(
        module, (x,), mesh=DeviceMesh.arange(tp=2), adapters={"1": 2},
        layouts={"1.weight": {"tp": Shard(0)}, "*.lora_A": {"tp": Shard(1)}},
    )  # fmt: skip
    step = model.training_step(
        lambda y: y.sum(), optimizer=mf.optim.sgd, frozen=["1.weight", "1.bias"]
    )
    assert step.trained == ("0.weight", "0.bias", "1.lora_A", "1.lora_B")
    weights = model.load(rank=0)
    assert [w.shape for w in weights[-2:]] == [(2, 3), (2, 2)]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a name": ({"*.k_prj": 2}, LayoutError, r"adapters\['\*\.k_prj'\] matches nothing(?s:.)*0"),
    "no linear layer": ({"1": 2}, LayoutError, "matches nothing"),
    "a rank": ({"0": 0}, DefinitionError, "a rank from 1"),
    "a large rank": ({"0": 7}, DefinitionError, "6 inputs and 8 outputs"),
    "no rank": ({"0": "8"}, DefinitionError, "a rank from 1"),
    "two patterns": ({"?": 2, "*": 2}, LayoutError, "both match 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(what: str) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    said, kind, says = WRONG[what]
    with pytest.raises(kind, match=says):
        mf.from_torch(module, (torch.ones(2, 6),), mesh=DeviceMesh.arange(tp=2), adapters=said)
    assert [*module.state_dict()] == ["0.weight", "0.bias"]


class Conv1D(nn.Module):
    """A layer of the user's, which has the name of one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def test_a_class_of_the_name_of_a_linear_layer_is_imported() -> None:
    module, x = Conv1D(), torch.randn(2, 2, 5)
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2))
    (y,) = mf.simulate(model.compile(), [*model.load(), x]).outputs
    torch.testing.assert_close(y, module(x).detach())
    with pytest.raises(LayoutError, match="matches no"):
        mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2), adapters={"*": 2})


def test_a_parameter_of_that_name_is_refused() -> None:
    module = nn.Linear(6, 8)
    module.lora_A = nn.Parameter(torch.ones(2))
    with pytest.raises(DefinitionError, match="a parameter lora_A of its own"):
        mf.from_torch(module, (torch.ones(2, 6),), mesh=DeviceMesh.arange(tp=2), adapters={"*": 2})
