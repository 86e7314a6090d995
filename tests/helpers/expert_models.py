"""Small causal models of transformers with experts, and where `tp` splits their matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mdfuse import Shard

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
    "Llama 4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **SIZES, head_dim=8, intermediate_size_mlp=8, num_local_experts=4,
            interleave_moe_layer_step=1, attn_temperature_tuning=False,
        )
    ),
}  # fmt: skip

#: pattern -> the dim of matrices inside experts, and of their biases, that `tp` splits.
INSIDE: Mapping[str, Mapping[str, int]] = {
    "GPT-OSS": {"*.gate_up_proj": 2, "*.gate_up_proj_bias": 1, "*.down_proj": 1},
    "Llama 4": {"*.gate_up_proj": 2, "*.down_proj": 1},
}
#: of other models
_LINEAR: Mapping[str, int] = {"*.gate_up_proj": 1, "*.down_proj": 2}


def ids(rows: int = 4, positions: int = 6) -> Tensor:
    """Return tokens, the same ones each time."""
    return torch.randint(3, 32, (rows, positions), generator=torch.Generator().manual_seed(1))


def module_of(name: str) -> nn.Module:
    """Return a model, with the same random numbers each time."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


def inside_experts(name: str, axis: str = "tp", experts: str = "ep") -> dict[str, Any]:
    """Return layouts of matrices that one axis splits by experts, another inside of them.

    Gates and values that stand behind each other are two blocks, of which a rank has parts alike.
    """
    layouts: dict[str, Any] = {"*.experts.*": {experts: Shard(0)}}
    for pattern, dim in INSIDE.get(name, _LINEAR).items():
        blocks = {"blocks": 2} if "gate" in pattern and name != "GPT-OSS" else {}
        layouts[f"*.experts{pattern[1:]}"] = {experts: Shard(0), axis: Shard(dim, **blocks)}
    return layouts
