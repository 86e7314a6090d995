"""Which models can be served, and what their caches are."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.causal import SIZES, model_of

import mdfuse as mf
from mdfuse.serving.decoder import cache_types, own_attention


def test_caches_follow_from_the_module() -> None:
    """Also of a module on the meta device, in 16 bits."""
    with torch.device("meta"):
        config = transformers.Qwen3Config(**{**SIZES, "num_key_value_heads": 1, "head_dim": 12})
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    of_layers = {f"{c}{n}": (1, 12, torch.bfloat16) for n in range(2) for c in "kv"}
    assert cache_types(model) == of_layers


def test_what_is_kept_compressed_is_refused() -> None:
    """Its layers compute keys from what they keep, which attention would not know."""
    sizes = {x: SIZES[x] for x in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = transformers.DeepseekV3Config(
        **sizes, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5,
        first_k_dense_replace=9,
    )  # fmt: skip
    with pytest.raises(mf.MdfuseError, match="other than those that it wrote"):
        cache_types(transformers.DeepseekV3ForCausalLM(config))


def test_the_module_stays_as_it_is() -> None:
    model = model_of("llama")
    before = model.config._attn_implementation
    with own_attention(model):
        assert model.config._attn_implementation == "mdfuse"
    assert model.config._attn_implementation == before
    assert "caches" not in dict(model.named_modules())


def test_other_state_than_keys_and_values_is_refused() -> None:
    config = transformers.MambaConfig(
        vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=1
    )
    with pytest.raises(mf.MdfuseError, match="a cache for MambaForCausalLM"):
        cache_types(transformers.MambaForCausalLM(config))
