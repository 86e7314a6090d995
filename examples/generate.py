"""Continue a text by a Llama, a byte or a token a step: one program, one plan.

python examples/train_llama.py --mesh tp=2 --steps 300 --sim --export model.safetensors
python examples/generate.py --checkpoint model.safetensors --prompt "You may"    # simulates 2 ranks
torchrun --nproc-per-node 4 examples/generate.py --mesh tp=2,sp=2 --checkpoint model.safetensors
torchrun --nproc-per-node 2 examples/generate.py --checkpoint Llama-3.2-1B --prompt "You may"
mdfuse dump examples/generate.py --mesh tp=2,sp=2                                # what a step does

A checkpoint is what train_llama.py exports or saves, or a folder with a Llama of transformers: its
`config.json`, files of safetensors, and the tokenizer. Each rank reads its part of it.

The program holds its state: keys and values of all positions so far, the last token, and how many
there were. A step writes the keys and values of one position where they belong, appends the most
probable token, and counts. Nothing of it depends on how far it has come, so all steps run one plan,
on GPUs one CUDA graph. The axes of the mesh say where things are:

    tp      heads, hidden units and the table of bytes are split
    sp      keys and values are split by positions
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import train_llama as own
from rich.progress import Progress, TextColumn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.cli.program_file import parse_mesh
from mdfuse.frontend.importing.load import InMemory, check_names, check_shape, opened

#: How many positions there is room for.
ROOM = 512

#: name of a parameter here -> in checkpoints of transformers.
NAMES = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    **{x: f"self_attn.{x}_proj" for x in "qkvo"},
    **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "table": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
}  # fmt: skip


# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama: its sizes; those of train_llama.py where nothing else is said.

    `longer` is how slow angles are slowed down for longer texts ("llama3"); None: not at all.
    """

    vocabulary: int = own.BYTES
    width: int = own.WIDTH
    hidden: int = own.HIDDEN
    layers: int = own.LAYERS
    heads: int = own.HEADS
    kv_heads: int = own.KV_HEADS
    head: int = own.HEAD
    eps: float = 1e-5
    theta: float = 10000.0
    longer: Mapping[str, Any] | None = None

    @property
    def parameters(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """name -> shape, and what is split along tp."""
        sizes = {"q": self.heads * self.head, "k": self.kv_heads * self.head, "gate": self.hidden}
        sizes |= {"v": sizes["k"], "up": self.hidden, "table": self.vocabulary}
        sizes |= {"head": self.vocabulary}
        shapes: dict[str, tuple[tuple[int, ...], int | None]] = {}
        names = ["table", *(f"{x}.{n}" for n in range(self.layers) for x in own.LAYER)]
        for name in (*names, "norm", "head"):
            kind = name.split(".")[0]
            if kind in sizes:
                shapes[name] = (sizes[kind], self.width), own.ROWS
            elif kind in ("o", "down"):
                rows = sizes["q"] if kind == "o" else self.hidden
                shapes[name] = (self.width, rows), own.COLUMNS
            else:
                shapes[name] = (self.width,), own.WHOLE
        return shapes

    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines for all positions."""
        speeds = self.theta ** (-torch.arange(0, self.head, 2, dtype=torch.float64) / self.head)
        if self.longer:
            low, high = (self.longer[f"{x}_freq_factor"] for x in ("low", "high"))
            turns = speeds * self.longer["original_max_position_embeddings"] / (2 * torch.pi)
            share = ((turns - low) / (high - low)).clamp(0, 1)
            speeds = speeds * (share + (1 - share) / self.longer["factor"])
        angles = torch.outer(torch.arange(ROOM, dtype=torch.float64), speeds).repeat(1, 2)
        return angles.cos().float(), angles.sin().float()


def model_of(config: dict[str, Any]) -> Model:
    """The sizes of a Llama of transformers."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    others = [config.get(x) for x in ("attention_bias", "mlp_bias")]
    is_known = config.get("model_type") == "llama" and config.get("hidden_act", "silu") == "silu"
    if not is_known or kind not in ("default", "llama3") or any(others):
        screen.fail(
            f"a {config.get('model_type')} with {kind} positions: a Llama without biases is needed"
        )
    heads = config["num_attention_heads"]
    return Model(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        hidden=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=config.get("head_dim") or config["hidden_size"] // heads,
        eps=config["rms_norm_eps"],
        theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        longer=rope if kind == "llama3" else None,
    )


class Weights:
    """Parameters of a checkpoint, or random ones; a rank reads what it has of them.

    Args:
        path: what train_llama.py exported or saved, or a folder with a Llama of transformers.
    """

    def __init__(self, path: Path | None) -> None:
        self.model, self.text, name = Model(), Text(None), str
        config = path / "config.json" if path is not None else None
        if config is not None and config.exists():
            said = json.loads(config.read_text(encoding="utf-8"))
            self.model, self.text = model_of(said), Text(config.with_name("tokenizer.json"))
            name = _named_by_transformers
        self._kept = InMemory(own.initial()) if path is None else opened(path)
        self._names = {x: name(x) for x in self.model.parameters}
        if self._names["head"] not in self._kept.names:  # tied
            self._names["head"] = self._names["table"]
        check_names(self._kept, [(x,) for x in self._names.values()])
        for x, (shape, _) in self.model.parameters.items():
            check_shape(self._kept, self._names[x], shape)

    def part(self, name: str, layout: Any, rank: int | None) -> Tensor:
        """Return a rank's part of a parameter; for None the whole."""
        shape = self.model.parameters[name][0]
        whole = tuple((0, n) for n in shape)
        box = whole if rank is None else layout.box(shape, rank)
        return self._kept.part(self._names[name], box).float()


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


# -- a step ----------------------------------------------------------------------------------------


def define(mesh: DeviceMesh, m: Model = Model()) -> mf.FusionDefinition:
    """A step: what it reads besides parameters and angles it writes in place."""
    heads = {"tp": Shard(1)} if "tp" in mesh.axes else {}
    positions = {"sp": Shard(2)} if "sp" in mesh.axes else {}
    with mf.FusionDefinition("generate") as fd:
        cos, sin = (
            fd.define_tensor([ROOM, m.head], mesh=mesh, name=name) for name in ("cos", "sin")
        )
        p = {
            name: fd.define_tensor(shape, mesh=mesh, layout=own.split_of(mesh, split), name=name)
            for name, (shape, split) in m.parameters.items()
        }
        token = fd.define_tensor([1, 1], torch.int64, mesh, name="token")
        at = fd.define_tensor([1], torch.int64, mesh, name="at")
        shape, where = [1, m.kv_heads, ROOM, m.head], {**heads, **positions}
        caches = {
            f"{kind}.{n}": fd.define_tensor(
                shape, mesh=mesh, layout=where, name=f"{kind}.cache.{n}"
            )
            for n in range(m.layers)
            for kind in "kv"
        }
        rotary = [x.index_select(0, at) for x in (cos, sin)]
        seen = fd.ops.arange(ROOM) <= at
        h = F.embedding(token, p["table"])
        for n in range(m.layers):
            w = {name: p[f"{name}.{n}"] for name in own.LAYER}
            x = F.rms_norm(h, (m.width,), w["norm_1"], m.eps)
            q, k, v = (F.linear(x, w[x_]).view(1, 1, -1, m.head).transpose(1, 2) for x_ in "qkv")
            q, k = (rotated(y, *rotary) for y in (q, k))
            news = [caches[f"{c}.{n}"].index_copy(2, at, y) for c, y in (("k", k), ("v", v))]
            h = h + F.linear(attention(m, q, *news, seen), w["o"])
            x = F.rms_norm(h, (m.width,), w["norm_2"], m.eps)
            h = h + F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"]), w["down"])
            for c, new in zip("kv", news, strict=True):
                fd.add_output(new, reuse=caches[f"{c}.{n}"])
        logits = F.linear(F.rms_norm(h, (m.width,), p["norm"], m.eps), p["head"])
        fd.add_output(logits.argmax(-1), reuse=token)
        fd.add_output(at + 1, reuse=at)
    return fd


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotate pairs of features by angles that grow with the position."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def attention(m: Model, q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Attend from one position to all earlier ones; each head of keys serves several of queries."""
    q = q.view(1, m.kv_heads, m.heads // m.kv_heads, m.head)
    scores = (q @ k.mT * m.head**-0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).reshape(1, 1, -1)


def initial_state(m: Model) -> dict[str, Tensor]:
    """Nothing so far."""
    shape = [1, m.kv_heads, ROOM, m.head]
    caches = {f"{c}.cache.{n}": torch.zeros(shape) for n in range(m.layers) for c in "kv"}
    token, at = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return {"token": token, "at": at, **caches}


def given(weights: Weights, fusion: Any, rank: int | None) -> dict[str, Tensor]:
    """All inputs by name: what a rank has of them, or the wholes."""
    m = weights.model
    parts = {name: weights.part(name, fusion.layout(name), rank) for name in m.parameters}
    for name, x in {
        **dict(zip(("cos", "sin"), m.angles(), strict=True)),
        **initial_state(m),
    }.items():
        layout = fusion.layout(name)
        parts[name] = x if rank is None else mf.shard_tensor(x, layout, rank=rank)
    return parts


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[Tensor]]:
    """The first step, for `mdfuse dump` and `mdfuse run`."""
    fd = define(mesh)
    parts = given(Weights(None), fd.fusion, None)
    return fd, [parts[name] for name in fd.fusion.inputs]


class Simulated:
    """Steps of all ranks in this process."""

    def __init__(self, mesh: DeviceMesh, weights: Weights) -> None:
        self.program = mf.compile(define(mesh, weights.model))
        self.given = given(weights, self.program.fusion, None)

    def __call__(self, token: int | None) -> int:
        """Return the token behind the ones so far, of which this is the last (None: that made)."""
        if token is not None:
            self.given["token"] = torch.tensor([[token]])
        fusion = self.program.fusion
        outputs = mf.simulate(self.program, [self.given[name] for name in fusion.inputs]).outputs
        for name, x in zip(fusion.outputs, outputs, strict=True):
            self.given[fusion.reuse[name]] = x
        return int(self.given["token"])


class Launched:
    """Steps of this rank, beside those of the others."""

    def __init__(self, mesh: DeviceMesh, weights: Weights) -> None:
        comm, self.program = mf.init(), mf.compile(define(mesh, weights.model))
        mine = {name: x.to(comm.device)
                for name, x in given(weights, self.program.fusion, comm.rank).items()}  # fmt: skip
        state = {name: mine.pop(name) for name in initial_state(weights.model)}
        self.step = mf.Step(self.program, state)
        self.others = [mine[name] for name in self.program.fusion.inputs if name in mine]

    def __call__(self, token: int | None) -> int:
        """As `Simulated`; the token comes to the host only where somebody asks for it."""
        if token is not None:
            self.step.state["token"].fill_(token)
        self.step(*self.others)
        return int(self.step.state["token"])


def generate(step: Callable[[int | None], int], prompt: Sequence[int], count: int) -> list[int]:
    """The tokens behind a prompt, each the most probable one."""
    tokens, began = list[int](), time.perf_counter()
    with Progress(TextColumn("{task.description}"), console=screen.output(), transient=True) as bar:
        task = bar.add_task("", total=None)
        for token in prompt[:-1]:
            step(token)
        token: int | None = prompt[-1]
        for n in range(count):
            tokens.append(step(token))
            token = None
            rate = (n + 1) / (time.perf_counter() - began)
            bar.update(task, description=f"{n + 1} of {count} tokens, {rate:,.0f} tokens a second")
    return tokens


def main() -> None:
    """Print a prompt, and what follows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="tp=2", help="axes, sizes: %(default)s")
    parser.add_argument("--checkpoint", type=Path, help="a file or a folder; random without one")
    parser.add_argument("--prompt", default="You may", help="a text: %(default)s")
    parser.add_argument("--tokens", type=int, default=256, help="how many follow: %(default)s")
    parser.add_argument("--sim", action="store_true", help="simulate, whoever started this process")
    arguments = parser.parse_args()
    with screen.errors():
        mesh = parse_mesh(arguments.mesh)
        is_alone = arguments.sim or detect(os.environ).size == 1
        if is_alone and not screen.is_first():
            return
        weights = Weights(arguments.checkpoint)
        prompt = weights.text.tokens(arguments.prompt)
        if not prompt or arguments.tokens < 0 or len(prompt) + arguments.tokens > ROOM:
            screen.fail(f"a prompt of some tokens, and with what follows at most {ROOM}")
        step = (Simulated if is_alone else Launched)(mesh, weights)
        continuation = generate(step, prompt, arguments.tokens)
    if screen.is_first():
        text = weights.text.text([*prompt, *continuation])
        screen.output().print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
