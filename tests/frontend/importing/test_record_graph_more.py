"""More models of transformers, unchanged: decoders beside encoders, images, sounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.trees import flattened

TP = DeviceMesh.arange(tp=2)
IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 8, dtype=torch.int64).index_put(
    (torch.tensor(1), torch.tensor(7)), torch.tensor(0)
)
WORDS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
TWO_SIDES: dict[str, Any] = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
VISION = {"image_size": 16, "patch_size": 8}
HEADS = {"*.q_proj.*": 0, "*.k_proj.*": 0, "*.v_proj.*": 0, "*.out_proj.weight": 1,
         "*.fc1.*": 0, "*.fc2.weight": 1}  # fmt: skip


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


#: model, its configuration, arguments, what tensor parallelism splits, how many posts that takes.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, int], int]] = {
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
         "decoder_start_token_id": 0},
        {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :5],
         "use_cache": False},
        {**{f"*Attention.{x}.weight": 0 for x in "qkv"}, "*Attention.o.weight": 1, "*.wi.*": 0,
         "*.wo.weight": 1, "*.relative_attention_bias.weight": 1},
        5,
    ),
    "whisper": (
        "WhisperModel",
        {**TWO_SIDES, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16,
         "bos_token_id": 1, "eos_token_id": 2},
        {"input_features": image(2, 8, 20), "decoder_input_ids": IDS[:, :5], "use_cache": False},
        HEADS,
        5,
    ),
    "clip": (
        "CLIPModel",
        {"text_config": {**WORDS, "eos_token_id": 63}, "projection_dim": 8,
         "vision_config": {**WORDS, **VISION}},
        {"input_ids": IDS.clone().index_fill(1, torch.tensor(6), 63),
         "pixel_values": image(2, 3, 16, 16)},
        HEADS,
        4,
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        {**WORDS, "vocab_size": 32, "conv_dim": (8, 8), "conv_stride": (5, 2),
         "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "num_feat_extract_layers": 2},
        {"input_values": image(2, 200)},
        {x: d for x, d in HEADS.items() if "fc" not in x},
        1,
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2},
        {"input_ids": IDS, "attention_mask": MASK, "use_cache": False},
        {"*.dense_h_to_4h.*": 0, "*.dense_4h_to_h.weight": 1},
        1,
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**WORDS, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
         "sliding_window": 4},
        {"input_ids": IDS, "use_cache": False},
        {"*.q_proj.*": 0, "*.k_proj.*": 0, "*.v_proj.*": 0, "*.o_proj.weight": 1,
         "*.gate_proj.*": 0, "*.up_proj.*": 0, "*.down_proj.weight": 1},
        2,
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2],
         "layer_type": "bottleneck"},
        {"pixel_values": image(2, 3, 32, 32)},
        {},
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_itself(name: str) -> None:
    kind, config, given, splits, posts = MODELS[name]
    of = getattr(transformers, kind)
    torch.manual_seed(0)
    module = of(of.config_class(**config)).eval().to(torch.float64)
    layouts = {pattern: {"tp": Shard(d)} for pattern, d in splits.items()}
    if not splits:  # images are split, all else is whole
        layouts["input:*"] = {"tp": Shard(0)}
    model = mf.from_torch(module, (), given, mesh=TP, layouts=layouts)
    program = model.compile()
    found = mf.simulate(program, [*model.load(), *model.inputs(**given)]).outputs
    with torch.no_grad():
        wanted = module(**given)
    pairs = [[x for _, x in flattened(y)[0] if isinstance(x, Tensor)]
             for y in (model.outputs(found), wanted)]  # fmt: skip
    torch.testing.assert_close(*pairs, rtol=1e-7, atol=1e-9)
    assert [c.kind for c in program.communications] == ["Allreduce"] * posts
