"""Continue a text by a causal model, a byte or a token a step: `mf.generate` does it.

python examples/train_llama.py --mesh tp=2 --steps 300 --sim --export model.safetensors
python examples/generate.py --checkpoint model.safetensors --prompt "You may"    # simulates 2 ranks
torchrun --nproc-per-node 4 examples/generate.py --mesh tp=2,cp=2 --checkpoint model.safetensors
torchrun --nproc-per-node 2 examples/generate.py --checkpoint Llama-3.2-1B --prompt "You may"
mdfuse dump examples/generate.py --mesh tp=2,cp=2                                # what a step does

A checkpoint is what train_llama.py exports or saves, or a folder with a causal model of
transformers and its tokenizer.

A step writes the keys and values of one position where they belong, and chooses the next token. Its
shapes do not depend on how far it has come, so all steps run one plan, on GPUs one CUDA graph. The
axes of the mesh say where things are:

    tp      heads, hidden units and the table of bytes are split, as the model's own plan says
    cp      keys and values are split by positions
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import train_llama as own
from rich.progress import Progress, TextColumn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.cli import screen
from mdfuse.cli.program_file import parse_mesh
from mdfuse.frontend.importing.load import InMemory, check_names, check_shape, opened

#: How many positions there is room for.
ROOM = 512

#: name of a parameter in train_llama.py -> in models of transformers.
NAMES = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    **{x: f"self_attn.{x}_proj" for x in "qkvo"},
    **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "table": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
}  # fmt: skip


def by_bytes(path: Path | None) -> Any:
    """The Llama of train_llama.py, with what it exported or saved; with random numbers for None."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=own.BYTES, hidden_size=own.WIDTH, intermediate_size=own.HIDDEN,
        num_hidden_layers=own.LAYERS, num_attention_heads=own.HEADS,
        num_key_value_heads=own.KV_HEADS, head_dim=own.HEAD, rms_norm_eps=1e-5,
        max_position_embeddings=ROOM, eos_token_id=None,
    )  # fmt: skip
    checkpoint = InMemory(own.initial()) if path is None else opened(path)
    check_names(checkpoint, [(name,) for name in own.PARAMETERS])
    parameters: dict[str, Tensor] = {}
    for name, (shape, _) in own.PARAMETERS.items():
        check_shape(checkpoint, name, shape)
        part = checkpoint.part(name, tuple((0, n) for n in shape))
        parameters[_named_by_transformers(name)] = part.float()
    module = LlamaForCausalLM(config).eval()
    module.load_state_dict(parameters)
    return module


def _named_by_transformers(name: str) -> str:
    kind, _, layer = name.partition(".")
    return f"model.layers.{layer}.{NAMES[kind]}.weight" if layer else NAMES[kind]


class Text:
    """Text as tokens: bytes, or what a file of `tokenizers` says."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer: Any = None
        if path is not None and path.exists():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self._tokenizer.encode(text).ids if self._tokenizer else [*text.encode()]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        if self._tokenizer:
            return str(self._tokenizer.decode([*tokens]))
        return bytes(x for x in tokens if x < 256).decode(errors="replace")


def opened_with(
    mesh: DeviceMesh | None, path: Path | None, options: mf.Options | None = None
) -> tuple[Any, Text]:
    """An engine for one request, and its text; without a checkpoint, random."""
    is_folder = path is not None and (path / "config.json").exists()
    model = path if path is not None and is_folder else by_bytes(path)
    text = Text(path / "tokenizer.json" if path is not None and is_folder else None)
    return mf.generate(model, mesh, max_batch=1, context=ROOM, options=options), text


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[Any]]:
    """The first step, for `mdfuse dump` and `mdfuse run`."""
    engine, _ = opened_with(mesh, None)
    model = engine.programs.models[False]
    step = torch.zeros(engine.programs.without_chunk.size, dtype=torch.int64)
    return model.definition, [*model.load(), *model.inputs(step)]


def generate(engine: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens behind a prompt, each the most probable one."""
    began = time.perf_counter()
    request = engine.submit([*prompt], max_tokens=count)
    with Progress(TextColumn("{task.description}"), console=screen.output(), transient=True) as bar:
        task = bar.add_task("", total=None)
        while engine.step():
            n = len(engine.result(request).tokens)
            rate = n / (time.perf_counter() - began)
            bar.update(task, description=f"{n} of {count} tokens, {rate:,.0f} tokens a second")
    return [*engine.result(request).tokens]


def main() -> None:
    """Print a prompt, and what follows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="tp=2", help="axes, sizes: %(default)s")
    parser.add_argument("--checkpoint", type=Path, help="a file or a folder; random without one")
    parser.add_argument("--prompt", default="You may", help="a text: %(default)s")
    parser.add_argument("--tokens", type=int, default=256, help="how many follow: %(default)s")
    arguments = parser.parse_args()
    with screen.errors():
        engine, text = opened_with(parse_mesh(arguments.mesh), arguments.checkpoint)
        prompt = text.tokens(arguments.prompt)
        if not screen.is_first():
            engine.follow()
            return
        continuation = text.text([*prompt, *generate(engine, prompt, arguments.tokens)])
        engine.close()
        screen.output().print(continuation, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
