"""Plans of torch and of transformers, as layouts."""

from __future__ import annotations

import fnmatch
from collections import Counter
from typing import Any

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


def _config(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0, **more,
    )  # fmt: skip


#: models whose plans name what other configurations of them have, each with such a path
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_moe": (
        {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
        "model.layers.*.mlp.gate_proj",
    ),
    "llama4_text": (
        {"num_local_experts": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 16},
        "layers.*.self_attn.q_proj",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_paths_of_other_configurations_are_skipped(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    settings, path = OTHERS[kind]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(_config(kind, **settings)).eval()
    ids = torch.randint(1, 64, (2, 8))
    said = mf.from_plan(module)
    assert path in said["skipped"]
    for pattern in ("*.q_proj.weight", "*.experts.gate_up_proj"):
        assert fnmatch.filter(said["layouts"], pattern), said["layouts"]
    model = mf.from_torch(module, (ids,), {"use_cache": False}, mesh=TP, **said)
    (line,) = (x for x in model.report().splitlines() if "skipped of the plan" in x)
    assert set(line.split(": ")[1].split(", ")) == {*said["skipped"]}
    found = model.outputs(mf.simulate(model.compile(), [*model.load(), ids]).outputs).logits
    with torch.no_grad():
        wanted = module(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "settings"), [
    ("qwen3_next", {"num_experts": 4, "layer_types": ["linear_attention", "full_attention"]}),
    ("deepseek_v2", {"n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 16}),
    ("granite_swa", {}), ("gpt_oss", {"num_local_experts": 4}),
])  # fmt: skip
def test_plans_of_transformers(kind: str, settings: dict[str, Any]) -> None:
    """Each style of theirs is known; each layout is one of a parameter that is there."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(_config(kind, **settings))
    said = mf.from_plan(module)
    assert {*said["layouts"]} <= {
        name for name, _ in module.named_parameters(remove_duplicate=False)
    }
    assert said["layouts"]["lm_head.weight"] == {"tp": Shard(0)}


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
        "layers.*.gate": ColwiseParallel(),
        "norm": SequenceParallel(),
        "packed": "packed_colwise",
    }
    said = mf.from_plan(Model(), plan, axis="y")
    assert said["layouts"] == {
        "table.weight": {"y": Shard(0)},
        **{f"layers.{n}.up.{x}": {"y": Shard(0)} for n in range(2) for x in ("weight", "bias")},
        **{f"layers.{n}.down.weight": {"y": Shard(1)} for n in range(2)},
        "packed": {"y": Shard(1)},
        **{f"{kind}:{path}": {"y": Shard(1)} for path in ("layers.1", "norm")
           for kind in ("argument", "activation")},
    }  # fmt: skip
    assert said["blocks"] == {"packed": {1: 2}}
    assert said["skipped"] == ["layers.*.gate"]
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
