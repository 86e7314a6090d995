"""Small models of transformers in folders, finetuned by torch on one device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from helpers.example_files import FOLDER, example

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
#: name of a config -> what it has besides.
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen3Config": {"head_dim": 8, "tie_word_embeddings": True},
    "Gemma3TextConfig": {
        "head_dim": 8, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Phi3Config": {"resid_pdrop": 0.0},
    "Olmo2Config": {},
    "GptOssConfig": {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    },
}  # fmt: skip
TEXT = FOLDER.parent / "LICENSE"
ROWS, LENGTH = 4, 10
LR, DECAY, CLIP, WARMUP = 1e-2, 0.1, 1.0, 2


def folder_of(name: str, to: Path, layers: int = 2) -> Path:
    """Write a model of so many layers with random numbers; return its folder."""
    import transformers

    given = {**SIZES, **CONFIGS[name], "num_hidden_layers": layers}
    if "layer_types" in given:
        given["layer_types"] = given["layer_types"][:layers]
    config = getattr(transformers, name)(**given)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(to)
    return to


def arguments(folder: Path, steps: int, *others: str) -> list[str]:
    """The command line of the example."""
    given = {"steps": steps, "batch": ROWS, "length": LENGTH, "lr": LR, "warmup": WARMUP}
    words = [str(x) for name, value in given.items() for x in (f"--{name}", value)]
    return [str(folder), str(TEXT), *words, "--decay", str(DECAY), "--clip", str(CLIP), *others]


def module_in(folder: Path) -> nn.Module:
    """The model of a folder, as torch trains it."""
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).train()


def loss_of(module: nn.Module, step: int) -> torch.Tensor:
    """The mean loss of a step's batch of bytes."""
    tokens = torch.tensor([*TEXT.read_bytes()])
    ids = example("finetune").batch_of(tokens, step, ROWS, LENGTH)
    logits = module(input_ids=ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def alone(folder: Path, steps: int) -> list[float]:
    """The losses of torch's AdamW: norms and biases do not decay."""
    module, losses = module_in(folder), []
    pairs = [*module.named_parameters()]
    vectors = [w for name, w in pairs if w.ndim == 1 or "bias" in name]
    others = [w for _, w in pairs if all(w is not x for x in vectors)]
    groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY)
    a = argparse.Namespace(lr=LR, warmup=WARMUP, steps=steps)
    for step in range(1, steps + 1):
        loss = loss_of(module, step)
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        for group in adamw.param_groups:
            group["lr"] = example("finetune").rate(step, a)
        adamw.step()
        losses.append(float(loss.detach()))
    return losses
