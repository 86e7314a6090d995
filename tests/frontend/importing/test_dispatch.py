"""Experts of transformers: rows go to the ranks of their experts and back, by a layout alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 8, "max_position_embeddings": 32,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-OSS": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, num_local_experts=4, head_dim=8)
    ),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, head_dim=8, moe_intermediate_size=8, num_experts=5)
    ),
    "Mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4)
    ),
    "OLMoE": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**SIZES, num_experts=4)
    ),
    "DeepSeek-V3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **SIZES, **LATENT, v_head_dim=8, moe_intermediate_size=8, n_routed_experts=4,
            n_group=2, topk_group=1, first_k_dense_replace=0, n_shared_experts=1,
        )
    ),
}  # fmt: skip
EP, SPLIT = DeviceMesh.arange(ep=2), {"ep": Shard(0)}
IDS = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))


def imported(name: str, mesh: DeviceMesh, tokens: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    layouts = {"*.experts.*": SPLIT, "input:*": tokens}
    kwargs = {"input_ids": IDS, "use_cache": False}
    return module, mf.from_torch(module, (), kwargs, mesh=mesh, layouts=layouts)


def check_step(module: nn.Module, model: Any, **how: Any) -> mf.Program:
    """Compare the gradients of a step with torch's; return its program."""

    def loss(y: Any) -> Any:
        return (y * y).mean()

    step = model.training_step(loss, optimizer=partial(mf.optim.sgd, lr=1.0), **how)
    program, weights = step.compile(), model.load()
    given = step.arguments(weights, step.state(weights), IDS)
    state = step.updated(mf.simulate(program, given).outputs)
    logits: Tensor = module(input_ids=IDS, use_cache=False).logits
    loss(logits).backward()
    for name, w in module.named_parameters():
        if w.grad is not None:
            torch.testing.assert_close(state[name], (w - w.grad).detach(), rtol=1e-3, atol=1e-5)
    return program


@pytest.mark.parametrize("name", MODELS)
def test_rows_go_to_their_experts(name: str) -> None:
    module, model = imported(name, EP, SPLIT)
    program = check_step(module, model)
    assert [c.kind for c in program.communications].count("AllToAll") == 4
    assert "as they are counted in a run" in program.explain()


def test_tokens_are_split_by_another_axis_too() -> None:
    mesh = DeviceMesh.arange(dp=2, ep=2)
    program = check_step(*imported("GPT-OSS", mesh, {"dp": Shard(0), "ep": Shard(0)}))
    assert "as they are counted in a run" in program.explain()


@pytest.mark.parametrize("tokens", [{}, SPLIT])
def test_rows_are_summed_where_they_cannot_be_sent(tokens: dict[str, Any]) -> None:
    """Where ranks have all tokens, and where the batch comes in microbatches."""
    program = check_step(*imported("Mixtral", EP, tokens), microbatches=2 if tokens else 1)
    assert not any(i.op == "fetch" for i in program.host.walk())


def test_a_recorded_module_takes_microbatches() -> None:
    """Rows stay sorted where the module is recorded, since its definition may become a pipeline."""
    module, model = imported("Mixtral", EP, SPLIT)
    with mf.FusionDefinition("recorded") as fd:
        ids = fd.define_tensor([4, 6], torch.int64, mesh=EP, layout=SPLIT, name="ids")
        result, _ = model.record(input_ids=ids, use_cache=False)
        fd.add_output(result["logits"] if isinstance(result, dict) else result)
    program = mf.pipeline(fd, microbatches=2, batch={"ids": 0})
    (logits,) = mf.simulate(program, [IDS, *model.load()]).outputs
    with torch.no_grad():
        wanted = module(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-5)
