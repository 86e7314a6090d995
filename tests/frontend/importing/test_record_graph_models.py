"""Models of transformers and of torch, unchanged: equal to the module, with the usual posts."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from helpers.tiny_models import LLAMA, MESHES, MODELS, Tiny, imported, llama
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.compiled.imported import ImportedModel
from mdfuse.trees import flattened


def ran(model: ImportedModel, tiny: Tiny) -> list[Tensor]:
    """The tensors that a simulated run returns, in the structure of the module."""
    given = [*model.load(), *model.inputs(*tiny.args, **tiny.kwargs)]
    result = model.outputs(mf.simulate(model.compile(), given).outputs)
    return tensors(result)


def tensors(tree: Any) -> list[Tensor]:
    return [x for _, x in flattened(tree)[0] if isinstance(x, Tensor)]


def expected(tiny: Tiny) -> list[Tensor]:
    with torch.no_grad():
        return tensors(tiny.module()(*tiny.args, **tiny.kwargs))


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel(name: str) -> None:
    tiny = MODELS[name]
    model = imported(name, "tp=2")
    posts = Counter(c.kind for c in model.compile().communications)
    assert posts == tiny.posts and "warning" not in model.report()
    close(ran(model, tiny), expected(tiny))


@pytest.mark.parametrize("name", MODELS)
def test_batches_beside_tensor_parallel(name: str) -> None:
    tiny = MODELS[name]
    model = imported(name, "dp=2,tp=2")
    posts = Counter((c.kind, c.axes) for c in model.compile().communications)
    assert posts == {(kind, ("tp",)): n for kind, n in tiny.posts.items()}
    close(ran(model, tiny), expected(tiny))


@pytest.mark.parametrize("mesh", MESHES)
def test_experts_as_they_are_shipped(mesh: str) -> None:
    """Tokens by their expert, which no rank sorts; torch has none in f64 but by loops."""
    tiny = MODELS["mixtral"]
    module: Any = tiny.module()
    module.set_experts_implementation("grouped_mm")
    where, layouts = MESHES[mesh]
    how: dict[str, Any] = {"gather": "fsdp"}
    if "tp" in mesh:
        layouts, how = {**tiny.layouts(), **layouts}, {"blocks": tiny.blocks}
    model = mf.from_torch(module, tiny.args, mesh=where, layouts=layouts, **how)
    posts = Counter((c.kind, c.axes) for c in model.compile().communications)
    gathers = len(model.compile().communications)
    assert posts == ({(kind, ("tp",)): n for kind, n in tiny.posts.items()} if "tp" in mesh
                     else {("Allgather", ("fsdp",)): gathers})  # fmt: skip
    found = {e.op for e in model.fusion.exprs}
    assert "routed_mm" in found and not found & {"grouped_mm", "sort"}
    module.set_experts_implementation("eager")
    wanted = module(*tiny.args).logits
    result = model.outputs(mf.simulate(model.compile(), [*model.load(), *tiny.args]).outputs)
    torch.testing.assert_close(result.logits, wanted.detach(), rtol=1e-6, atol=1e-9)
    step = model.training_step(lambda y: (y * y).mean(), optimizer=partial(mf.optim.sgd, lr=1.0))
    weights = model.load()
    given = step.arguments(weights, step.state(weights), *tiny.args)
    state = step.updated(mf.simulate(step.compile(), given).outputs)
    (wanted * wanted).mean().backward()
    for name, w in module.named_parameters():
        parts = [state[f"{name}.{i}"] for i in range(2) if f"{name}.{i}" in state]
        found = torch.cat(parts, 1) if parts else state[name]
        torch.testing.assert_close(found, (w - w.grad).detach(), rtol=1e-6, atol=1e-9)


def test_every_operation_has_the_line_of_the_model() -> None:
    tiny = MODELS["llama"]
    model = mf.from_torch(tiny.module(), tiny.args, mesh=DeviceMesh.arange(tp=2))
    sources = {str(e.source).split(":")[0] for e in model.fusion.exprs}
    assert sources == {"modeling_llama.py", "activations.py"}
    (attention,) = {str(e.source) for e in model.fusion.exprs if "attention" in e.op}
    assert "attn_output, attn_weights = attention_interface(" in attention_line(attention)


def attention_line(source: str) -> str:
    from transformers.models.llama import modeling_llama

    with open(modeling_llama.__file__, encoding="utf-8") as file:
        return file.read().splitlines()[int(source.split(":")[1]) - 1]


def test_names_of_inputs_are_those_of_parameters() -> None:
    tiny = MODELS["llama"]
    module = tiny.module()
    model = mf.from_torch(module, tiny.args, mesh=DeviceMesh.arange(tp=2), layouts=tiny.layouts())
    named = [name for name, _ in module.named_parameters()]
    inputs = model.fusion.inputs
    assert [*inputs[: len(named)]] == named and inputs[-1] == "input_ids"
    constants = inputs[len(named) : -1]
    shapes = [model.fusion.values[name].shape for name in constants]
    assert shapes == [(1, 1, 8, 8)] * 2  # cosines and sines, once for all layers


def test_each_axis_of_a_mask_is_what_it_is() -> None:
    """A mask of all ones is none; a causal one is no input."""
    tiny = MODELS["llama"]
    ones = torch.ones(4, 8, dtype=torch.long)
    module = tiny.module()
    plain = mf.from_torch(module, tiny.args, mesh=DeviceMesh.arange(tp=2))
    (first, *_) = [e for e in plain.fusion.exprs if e.op == "scaled_dot_product_attention"]
    assert first.kwargs["is_causal"] and first.inputs[3] is None
    masked = mf.from_torch(
        module, tiny.args, {"attention_mask": ones}, mesh=DeviceMesh.arange(tp=2)
    )
    (first, *_) = [e for e in masked.fusion.exprs if e.op == "scaled_dot_product_attention"]
    assert "is_causal" not in first.kwargs and first.inputs[3] is not None
    hidden = ones.clone()
    hidden[1, :3] = 0
    given = [*masked.load(), *masked.inputs(*tiny.args, attention_mask=hidden)]
    result = masked.outputs(mf.simulate(masked.compile(), given).outputs)
    with torch.no_grad():
        wanted = module(*tiny.args, attention_mask=hidden).logits
    torch.testing.assert_close(result.logits, wanted, rtol=1e-6, atol=1e-9)


def test_fully_sharded() -> None:
    tiny, model = MODELS["llama"], imported("llama", "fsdp=4")
    posts = Counter(c.kind for c in model.compile().communications)
    assert posts == {"Allgather": 21}
    close(ran(model, tiny), expected(tiny))


@pytest.mark.parametrize(
    ("name", "gathers"), [("gpt2", 28), ("bert", 39), ("vit", 40), ("encoder", 24)]
)
def test_fully_sharded_too(name: str, gathers: int) -> None:
    """Every parameter that is split is gathered once."""
    tiny = MODELS[name]
    model = imported(name, "fsdp=4")
    posts = Counter(c.kind for c in model.compile().communications)
    assert set(posts) == {"Allgather"} and posts["Allgather"] == gathers
    close(ran(model, tiny), expected(tiny))


def test_heads_that_ranks_share() -> None:
    """Two heads of keys on tp=4: they are replicated by leaving the patterns out."""
    splits = {p: d for p, d in LLAMA.items() if p not in ("*.k_proj.weight", "*.v_proj.weight")}
    layouts = {pattern: {"tp": Shard(dim)} for pattern, dim in splits.items()}
    tiny = MODELS["llama"]
    module = tiny.module()
    model = mf.from_torch(module, tiny.args, mesh=DeviceMesh.arange(tp=4), layouts=layouts)
    assert Counter(c.kind for c in model.compile().communications) == {"Allreduce": 5}
    close(ran(model, tiny), expected(tiny))


def test_a_deep_model_is_imported_in_seconds() -> None:
    """The definition of 8 layers has four times the operations of 2, and one set of constants."""
    tiny = MODELS["llama"]
    few = mf.from_torch(tiny.module(), tiny.args, mesh=DeviceMesh.arange(tp=2))
    deep = llama(layers=8).eval().double()
    many = mf.from_torch(deep, tiny.args, mesh=DeviceMesh.arange(tp=2))
    per_layer = (len(many.fusion.exprs) - len(few.fusion.exprs)) / 6
    assert len(few.fusion.exprs) - 2 * per_layer < per_layer
    assert len(many.fusion.inputs) - len(few.fusion.inputs) == 6 * 9
