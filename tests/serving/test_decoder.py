"""Which models can be served, and what their caches are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers.causal import SIZES, drain, greedy, model_of, prompts, with_drawn

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
    with pytest.raises(mf.MdfuseError, match="other than those that were written"):
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


def test_a_context_has_no_more_positions_than_their_table() -> None:
    """One token behind it would end the engine in a step, and the requests of all.

    The model is one that is trained: an engine has no part in that, nor in its dropout.
    """
    sizes = {"vocab_size": 97, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12}
    config = transformers.GPT2Config(**sizes, eos_token_id=None, bos_token_id=None)
    model = with_drawn(transformers.GPT2LMHeadModel(config)).train()
    with pytest.raises(mf.DefinitionError, match=r"(?s)embeddings of 12 pos.*context=12"):
        mf.generate(model, chunk=0, max_batch=1, context=13)
    engine = mf.generate(model, chunk=0, max_batch=1)
    assert engine.shape.context == 12
    (ids,) = prompts([7])
    asked = engine.submit(ids)
    drain(engine)
    assert model.training and model.transformer.drop.training
    assert engine.result(asked).tokens == greedy(model.eval(), ids, 5)


def test_layers_share_a_cache() -> None:
    """The last layer attends to keys and values of the first; only these are kept."""
    config = transformers.Gemma3nTextConfig(
        **SIZES, vocab_size_per_layer_input=97, hidden_size_per_layer_input=4, laurel_rank=2,
        altup_num_inputs=2, num_kv_shared_layers=1, layer_types=["full_attention"] * 2,
        activation_sparsity_pattern=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = with_drawn(transformers.Gemma3nForCausalLM(config).eval())
    assert [*cache_types(model)] == ["k0", "v0"]
    engine = mf.generate(model, max_batch=1, chunk=0, context=16)
    (ids,) = prompts([4])
    asked = engine.submit(ids, 3)
    drain(engine)
    assert engine.result(asked).tokens == greedy(model, ids, 3)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
         "long_factor": [2.0] * 4, "original_max_position_embeddings": 16},
    ],
    ids=lambda x: str(x["rope_type"]),
)  # fmt: skip
def test_frequencies_are_those_of_short_texts(rope: dict[str, Any]) -> None:
    """A long text before it, beside the engine, changes none of its tokens."""
    sizes = {**SIZES, "max_position_embeddings": 16, "num_hidden_layers": 1, "eos_token_id": None}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
    model = with_drawn(transformers.LlamaForCausalLM(config).eval())
    short, long = prompts([9, 20])
    wanted = greedy(model, short, 6)
    longer = greedy(model, long, 6)
    with pytest.raises(mf.MdfuseError, match="otherwise in texts of more than 16"):
        mf.generate(model, context=17)
    engine = mf.generate(model, max_batch=1, chunk=4)
    assert engine.shape.context == 16
    asked = engine.submit(short, 6)
    drain(engine)
    assert engine.result(asked).tokens == wanted
    assert greedy(model, long, 6) == longer


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("Doge", {}, "it computes with masks"),
        ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 1}, "it computes with masks"),
        ("GPTJ", {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}, "forward of one tok"),
        ("JetMoe", {"kv_channels": 8, "num_local_experts": 4}, "its forward of one token says"),
        ("OPT", {"ffn_dim": 8, "word_embed_proj_dim": 32}, "asks a cache for get_seq_length"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "asks a cache for get_conv_state"),
    ],
)
def test_models_that_are_not_served_say_why(kind: str, sizes: dict[str, Any], why: str) -> None:
    """Masks that are computed, attention of their own, states: no wrong token in silence."""
    said = {**SIZES, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None, **sizes}
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**said)
    )
    with pytest.raises(mf.MdfuseError, match=why):
        cache_types(model)
