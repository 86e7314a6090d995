"""Language models of transformers whose tokens are split along positions: values, steps, bytes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 5, "head_dim": 4, "layer_types": ["sliding_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {"head_dim": 4}, "Mistral": {"sliding_window": 5}, "Olmo2": {},
    "Gemma3": WINDOW,
    "GptOss": {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip
LENGTH = 24


def module_of(name: str, layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    sizes = {**SMALL, **MODELS[name], "num_hidden_layers": layers}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"] * layers
    module = getattr(transformers, f"{name}ForCausalLM")(config(**sizes))
    assert isinstance(module, nn.Module)
    return module.train() if name == "GptOss" else module.double().train()


def imported(module: nn.Module, length: int, zigzag: bool) -> tuple[mf.ImportedModel, torch.Tensor]:
    ids = torch.randint(3, 48, (1, length), generator=torch.Generator().manual_seed(length))
    split = {"cp": Shard(1, zigzag=zigzag)}
    arguments = {"input_ids": ids, "labels": ids, "use_cache": False}
    layouts = {"input:*": split, "output:logits": split}
    mesh = DeviceMesh.arange(cp=2)
    return mf.from_torch(module, (), arguments, mesh=mesh, layouts=layouts), ids


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_are_all_that_is_sent(name: str, zigzag: bool) -> None:
    """With one row of labels for each chunk, and numbers of the loss; the report names these."""
    module = module_of(name)
    model, ids = imported(module, LENGTH, zigzag)
    program = model.compile(options=mf.Options(context="gather"))
    loss, logits = mf.simulate(program, [*model.load(), ids, ids]).outputs
    with torch.no_grad():
        wanted = module(input_ids=ids, labels=ids, use_cache=False)
    torch.testing.assert_close(loss, wanted.loss, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, wanted.logits, atol=1e-4, rtol=1e-4)
    keys_and_values = 2 * LENGTH // 2 * 2 * 4 * logits.dtype.itemsize
    received = max(map(program.bytes_received, range(2)))
    has_window = "sliding_window" in MODELS[name]  # in zigzag order its rows are lined up first
    most = keys_and_values * (2 if has_window and zigzag else 1) + 64
    assert received <= most, [str(c) for c in program.communications]
    assert ("is brought together" in model.report()) or has_window


@pytest.mark.parametrize("shared", [1, 2])
def test_windows_bring_the_heads_that_keys_have(shared: int) -> None:
    """Not those of the query for which transformers repeats them: halos there, and back."""
    torch.manual_seed(0)
    config = {**SMALL, "num_key_value_heads": shared, "sliding_window": 3}
    module = transformers.MistralForCausalLM(transformers.MistralConfig(**config)).double().train()
    model, ids = imported(module, LENGTH, False)
    step = model.training_step(lambda loss, logits: loss, optimizer=partial(mf.optim.sgd, lr=1.0))
    program = step.compile(options=mf.Options(context="gather"))
    weights = model.load()
    ran = mf.simulate(program, step.arguments(weights, step.state(weights), ids, ids))
    updated = step.updated(ran.outputs)
    module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, w in module.named_parameters():
        torch.testing.assert_close(updated[name], w.detach() - w.grad, rtol=1e-6, atol=1e-6)
    halos = [c for c in program.communications if c.kind == "Exchange" and c.shape[-1] == 4]
    assert [c.shape[-3] for c in halos] == [shared] * 4
    assert sum(c.bytes_received(1) for c in halos) == 2 * 2 * shared * 4 * 8


@pytest.mark.parametrize(("length", "zigzag"), [(LENGTH, True), (9, True), (3, False)])
def test_a_step_is_torchs(length: int, zigzag: bool) -> None:
    """Gradients of all parameters: also for uneven chunks, and for fewer tokens than chunks."""
    module = module_of("Llama")
    model, ids = imported(module, length, zigzag)
    step = model.training_step(lambda loss, logits: loss, optimizer=partial(mf.optim.sgd, lr=1.0))
    weights = model.load()
    ran = mf.simulate(step.compile(), step.arguments(weights, step.state(weights), ids, ids))
    updated = step.updated(ran.outputs)
    module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, w in module.named_parameters():
        torch.testing.assert_close(updated[name], w.detach() - w.grad)


@pytest.mark.parametrize(("name", "zigzag", "length"), [("Qwen3", True, 9), ("Gemma3", False, 3)])
def test_stages_whose_meshes_split_positions(name: str, zigzag: bool, length: int) -> None:
    """A row in each of two microbatches, in chunks of which some are short or empty."""
    module = module_of(name, layers=2)
    ids = torch.randint(3, 48, (2, length), generator=torch.Generator().manual_seed(length))
    arguments = {"input_ids": ids, "labels": ids, "use_cache": False}
    meshes = [DeviceMesh([2 * n, 2 * n + 1], axes=["cp"]) for n in range(2)]
    layouts = {"input:*": {"cp": Shard(1, zigzag=zigzag)}}
    model = mf.from_torch(module, (), arguments, stages=meshes, layouts=layouts)
    sgd = partial(mf.optim.sgd, lr=1.0)
    step = model.training_step(lambda loss, _: loss, optimizer=sgd, microbatches=2, schedule="1f1b")
    weights = model.load()
    ran = mf.simulate(step.compile(), step.arguments(weights, step.state(weights), ids, ids))
    losses = [module(input_ids=x, labels=x, use_cache=False).loss for x in ids.split(1)]
    torch.stack(losses).mean().backward()
    for key, w in module.named_parameters():
        torch.testing.assert_close(step.updated(ran.outputs)[key], w.detach() - w.grad)


def test_the_report_says_where_zigzag_order_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDFUSE_CONTEXT", "gather")
    lines = {z: imported(module_of("Llama"), 32, z)[0].report() for z in (False, True)}
    assert "Shard(dim, zigzag=True)" in lines[False]
    assert "zigzag=True" not in lines[True]


@pytest.mark.parametrize("zigzag", [False, True])
def test_a_step_around_rings_is_torchs(zigzag: bool) -> None:
    """A ring forwards, and one backwards; logits go in chunks where rows are one run."""
    module = module_of("Llama")
    model, ids = imported(module, 11, zigzag)
    step = model.training_step(lambda loss, logits: loss, optimizer=partial(mf.optim.sgd, lr=1.0))
    program = step.compile(options=mf.Options(context="ring", logits_bytes=512))
    weights = model.load()
    ran = mf.simulate(program, step.arguments(weights, step.state(weights), ids, ids))
    module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, w in module.named_parameters():
        torch.testing.assert_close(step.updated(ran.outputs)[name], w.detach() - w.grad)
    rings = [i for i in program.for_rank(0).walk() if i.fn in ("attention_terms", "attention_grad")]
    assert len(rings) == 2
    assert "losses and gradients in " in program.explain()


@pytest.mark.parametrize("form", ["gather", "heads", "ring", "auto"])
@pytest.mark.parametrize("zigzag", [False, True])
def test_documents_packed_into_a_row(zigzag: bool, form: str) -> None:
    """Positions that restart, from which transformers makes the mask; the report says the form."""
    module = module_of("Llama")
    ids = torch.randint(3, 48, (1, 13), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in (5, 1, 4, 3)]).unsqueeze(0)
    arguments = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    split = {"cp": Shard(1, zigzag=zigzag)}
    layouts = {"input:*": split, "output:logits": split}
    model = mf.from_torch(module, (), arguments, mesh=DeviceMesh.arange(cp=2), layouts=layouts)
    step = model.training_step(lambda loss, logits: loss, optimizer=partial(mf.optim.sgd, lr=1.0))
    program = step.compile(options=mf.Options(context=form))
    weights = model.load()
    ran = mf.simulate(program, step.arguments(weights, step.state(weights), ids, ids, positions))
    module(**arguments).loss.backward()
    for name, w in module.named_parameters():
        torch.testing.assert_close(step.updated(ran.outputs)[name], w.detach() - w.grad)
    form = "gather" if form == "auto" else form
    assert f"positions split along cp: {form}" in program.explain()
    assert not re.findall(r"bool\[1,1,\d+,\d+\]", str(program.for_rank(0)))
    assert "numbers of documents in the place of a mask" in program.explain()
    assert ", and 1 more" not in program.explain()
    assert "numbers of documents in the place of a mask" in model.report()
