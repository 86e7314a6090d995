"""Small causal models of transformers with drawn parameters, and what they say by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]

#: name -> the class, its configuration, and sizes besides.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 4, "layer_types": KINDS},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {"num_local_experts": 2, "attention_chunk_size": 5, "intermediate_size_mlp": 24,
         "pad_token_id": 0, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
         "layer_types": KINDS},
    ),
}  # fmt: skip


def model_of(name: str, seed: int = 0, **sizes: Any) -> Any:
    """A model whose parameters are drawn; no token ends a text."""
    kind, config, others = MODELS[name]
    said = {**SIZES, **others, "eos_token_id": None, **sizes}
    return with_drawn(
        getattr(transformers, kind)(getattr(transformers, config)(**said)).eval(), seed
    )


def with_drawn(model: Any, seed: int = 0) -> Any:
    """The model, with drawn parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn(x.shape, generator=generator) * 0.3)
    return model


def prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Drawn prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(97, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def greedy(model: Any, ids: Sequence[int], count: int) -> tuple[int, ...]:
    """The tokens behind a prompt, by transformers' `generate`."""
    given = torch.tensor([[*ids]])
    whole = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return tuple(whole[0, len(ids) :].tolist())


def drain(engine: Any, most: int = 10_000) -> int:
    """Compute until nothing is left; how many steps that took."""
    for n in range(most):
        if not engine.step():
            return n
    raise AssertionError(f"there is work after {most} steps")
