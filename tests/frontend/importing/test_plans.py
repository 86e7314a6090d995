"""Plans of torch and of transformers, as layouts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.tiny_models import MODELS
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import mdfuse as mf
from mdfuse import DeviceMesh, LayoutError, Shard

TP = DeviceMesh.arange(tp=2)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_plan_that_a_model_brings(name: str) -> None:
    tiny = MODELS[name]
    module = tiny.module()
    model = mf.from_torch(module, tiny.args, mesh=TP, **mf.from_plan(module))
    by_hand = mf.from_torch(module, tiny.args, mesh=TP, layouts=tiny.layouts(), blocks=tiny.blocks)
    for name in model.fusion.inputs:
        assert model.fusion.values[name].layout == by_hand.fusion.values[name].layout, name
    assert Counter(c.kind for c in model.compile().communications) == tiny.posts
    given = [*model.load(), *tiny.args]
    found = model.outputs(mf.simulate(model.compile(), given).outputs).logits
    with torch.no_grad():
        wanted = module(*tiny.args).logits
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


class Model(nn.Module):
    """A table, two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(4)
        self.packed = nn.Parameter(torch.ones(3, 8, 4))


def test_styles_of_torch() -> None:
    plan = {
        "table": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "layers.1": SequenceParallel(),
        "norm": SequenceParallel(),
        "packed": "packed_colwise",
    }
    said = mf.from_plan(Model(), plan, axis="y")
    assert said["layouts"] == {
        "table.weight": {"y": Shard(0)},
        **{f"layers.{n}.up.{x}": {"y": Shard(0)} for n in range(2) for x in ("weight", "bias")},
        **{f"layers.{n}.down.weight": {"y": Shard(1)} for n in range(2)},
        "packed": {"y": Shard(1)},
    }
    assert said["blocks"] == {"packed": {1: 2}}
    columns = mf.from_plan(Model(), {"table": ColwiseParallel()})
    assert columns["layouts"] == {"table.weight": {"tp": Shard(1)}}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (None, "Model has no plan"),
        ({}, "Model has no plan"),
        ({"layers.*.upp": ColwiseParallel()}, r"leads nowhere(.|\n)*layers\.0\.up"),
        ({"layers.0.up": "grouped_gemm"}, "the style grouped_gemm of 'layers.0.up'"),
    ],
)
def test_refused(plan: object, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        mf.from_plan(Model(), plan)  # type: ignore[arg-type]
