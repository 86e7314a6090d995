"""Train a small Llama on the text of this repository's licence: one program is the whole step.

python examples/train_llama.py --mesh dp=2,tp=2                      # simulates 4 ranks
torchrun --nproc-per-node 4 examples/train_llama.py --mesh fsdp=4    # on 4 processes
torchrun --nproc-per-node 4 examples/train_llama.py --mesh dp=2,sp=2 --steps 200 --save state
mdfuse dump examples/train_llama.py --mesh dp=2,tp=2                 # forward, backward and update

The model and its loss are written once, for one device; the axes of the mesh say where things are:

    dp      the batch is split
    fsdp    the batch is split, and so are parameters and the optimizer's state, until they are read
    tp      heads, hidden units and the table of bytes are split
    sp      likewise, and activations between the layers are split by positions

Afterwards the same steps are made on one device by torch, and the losses compared. With matplotlib
the two curves are drawn into `train_llama.svg`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.cli.launched_runs import local_inputs
from mdfuse.cli.program_file import parse_mesh

BYTES, WIDTH, HEADS, KV_HEADS, HIDDEN, LAYERS = 256, 64, 4, 2, 128, 2
BATCH, LENGTH, HEAD = 8, 64, WIDTH // HEADS
LR, DECAY, CLIP = 3e-3, 0.01, 1.0

#: What a rank's part of a parameter is a part of: rows (outputs) or columns (inputs) of a weight.
ROWS, COLUMNS, WHOLE = 0, 1, None

#: The parameters of a layer's halves: attention, and hidden units.
FIRST = {
    "norm_1": ((WIDTH,), WHOLE),
    "q": ((WIDTH, WIDTH), ROWS),
    "k": ((KV_HEADS * HEAD, WIDTH), ROWS),
    "v": ((KV_HEADS * HEAD, WIDTH), ROWS),
    "o": ((WIDTH, WIDTH), COLUMNS),
}
SECOND = {
    "norm_2": ((WIDTH,), WHOLE),
    "gate": ((HIDDEN, WIDTH), ROWS),
    "up": ((HIDDEN, WIDTH), ROWS),
    "down": ((WIDTH, HIDDEN), COLUMNS),
}
LAYER = {**FIRST, **SECOND}
PARAMETERS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "table": ((BYTES, WIDTH), ROWS),
    **{f"{name}.{n}": of for n in range(LAYERS) for name, of in LAYER.items()},
    "norm": ((WIDTH,), WHOLE),
    "head": ((BYTES, WIDTH), ROWS),
}


# -- the model, on one device ----------------------------------------------------------------------


def loss_of(p: Any, tokens: Any, targets: Any, rotary: Any, between: Any = lambda x: x) -> Any:
    """The mean of -log p(next byte); for tensors, and for values of a definition.

    Args:
        p: parameters by name.
        tokens, targets: bytes, [batch, positions].
        rotary: cosines and sines, [positions, features of a head].
        between: places the activations between layers.
    """
    h = between(F.embedding(tokens, p["table"]))
    for n in range(2 * LAYERS):
        h = between(h + half(p, n, h, rotary))
    return judged(p, h, targets)


def half(p: Any, n: int, h: Any, rotary: Any) -> Any:
    """Return the addend of half a layer: attention for even n, else the hidden units."""
    layer = n // 2
    w = {name: p[f"{name}.{layer}"] for name in (SECOND if n % 2 else FIRST)}
    if n % 2 == 0:
        return attention(w, F.rms_norm(h, (WIDTH,), w["norm_1"], 1e-5), rotary)
    x = F.rms_norm(h, (WIDTH,), w["norm_2"], 1e-5)
    x = F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"])
    return F.linear(x, w["down"])


def judged(p: Any, h: Any, targets: Any) -> Any:
    """The mean of -log p(next byte) for what the last layer gives."""
    logits = F.linear(F.rms_norm(h, (WIDTH,), p["norm"], 1e-5), p["head"])
    return F.cross_entropy(logits.permute(0, 2, 1), targets)


def attention(w: Any, x: Any, rotary: Any) -> Any:
    """Causal attention with rotary embedding; each head of keys serves several of queries."""
    rows, length, _ = x.shape
    q, k, v = (F.linear(x, w[n]).view(rows, length, -1, HEAD).transpose(1, 2) for n in "qkv")
    q, k = (rotated(y, *rotary) for y in (q, k))
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).reshape(rows, length, -1), w["o"])


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotate pairs of features by angles that grow with the position (arXiv:2104.09864)."""
    left, right = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return x * cos + torch.cat((-right, left), -1) * sin


def angles() -> tuple[Tensor, Tensor]:
    """Cosines and sines for all positions."""
    speeds = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angles = torch.outer(torch.arange(LENGTH, dtype=torch.float64), speeds).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def initial() -> dict[str, Tensor]:
    """Random parameters, whole; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape)
        if split is WHOLE
        else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, (shape, split) in PARAMETERS.items()
    }


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Stretches of the text, and the same one byte further; without end."""
    text = (Path(__file__).parents[1] / "LICENSE").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        chosen = torch.stack([data[at : at + LENGTH + 1] for at in starts.tolist()])
        yield chosen[:, :-1], chosen[:, 1:]


# -- the step, on a mesh ---------------------------------------------------------------------------


def split_of(mesh: DeviceMesh, split: int | None) -> dict[str, Shard]:
    """Return the layout of a parameter while it is read."""
    return {} if split is WHOLE else {a: Shard(split) for a in ("tp", "sp") if a in mesh.axes}


def define(mesh: DeviceMesh) -> mf.FusionDefinition:
    """Forward, backward, clipping and AdamW; parameters and moments are written in place."""
    batch = {axis: Shard(0) for axis in ("dp", "fsdp") if axis in mesh.axes}
    fsdp = {"fsdp": Shard(0)} if "fsdp" in mesh.axes else {}
    positions = {"sp": Shard(1)} if "sp" in mesh.axes else {}
    with mf.FusionDefinition("step") as fd:
        tokens = fd.define_tensor([BATCH, LENGTH], torch.int64, mesh, batch, name="tokens")
        targets = fd.define_tensor([BATCH, LENGTH], torch.int64, mesh, batch, name="targets")
        rotary = [fd.define_tensor([LENGTH, HEAD], mesh=mesh, name=n) for n in ("cos", "sin")]
        count = fd.define_tensor([], mesh=mesh, name="count")
        params, moments = {}, {}
        for name, (shape, split) in PARAMETERS.items():
            where = {**split_of(mesh, split), **fsdp}
            params[name] = fd.define_tensor(shape, mesh=mesh, layout=where, name=name)
            moments[name] = [
                fd.define_tensor(shape, mesh=mesh, layout=where, name=f"{name}.{kind}")
                for kind in ("mean", "square")
            ]
        read = params
        if fsdp:
            with mf.recompute():  # gathered again in the backward
                read = {
                    name: fd.ops.set(w).on(mesh, split_of(mesh, PARAMETERS[name][1]))
                    for name, w in params.items()
                }

        def between(h: Any) -> Any:
            return fd.ops.set(h).on(mesh, {**batch, **positions}) if positions else h

        loss = loss_of(read, tokens, targets, rotary, between)
        grads, norm = mf.optim.clip_by_global_norm(mf.grad(loss, list(params.values())), CLIP)
        fd.add_output(loss)
        fd.add_output(norm)
        for (name, w), dw in zip(params.items(), grads, strict=True):
            olds = (w, *moments[name])
            news = mf.optim.adamw(w, dw, *moments[name], count, lr=LR, weight_decay=DECAY)
            for new, old in zip(news, olds, strict=True):
                fd.add_output(new, reuse=old)
    return fd


def state() -> list[Tensor]:
    """Parameters, each followed by its moments, whole, in the order of the inputs."""
    return [x for w in initial().values() for x in (w, torch.zeros_like(w), torch.zeros_like(w))]


def program(mesh: DeviceMesh, microbatches: int) -> mf.Program:
    """The step, its batch taken at once or in microbatches."""
    if microbatches == 1:
        return mf.compile(define(mesh))
    batch = {"tokens": 0, "targets": 0}
    return mf.pipeline(define(mesh), microbatches=microbatches, batch=batch)


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[Tensor]]:
    """The first step, for `mdfuse dump` and `mdfuse run`."""
    return define(mesh), [*next(batches()), *angles(), torch.tensor(1.0), *state()]


class Simulated:
    """Steps of all ranks in this process."""

    def __init__(self, mesh: DeviceMesh, microbatches: int = 1) -> None:
        self.program, self.state = program(mesh, microbatches), state()

    def __call__(self, *inputs: Tensor) -> float:
        loss, _, *self.state = mf.simulate(self.program, [*inputs, *self.state]).outputs
        return float(loss.detach())

    def parameters(self) -> dict[str, Tensor]:
        """They are whole here; their moments stand behind each."""
        return dict(zip(PARAMETERS, self.state[::3], strict=True))


class Launched:
    """Steps of this rank, beside those of the others."""

    def __init__(self, mesh: DeviceMesh, microbatches: int = 1) -> None:
        self.comm, self.program = mf.init(), program(mesh, microbatches)
        names = self.program.fusion.inputs
        mine = local_inputs(self.program, build(mesh)[1], self.comm)
        self.step = mf.Step(self.program, dict(zip(names[5:], mine[5:], strict=True)))
        self.layouts = [self.program.fusion.layout(name) for name in names[:5]]

    def __call__(self, *inputs: Tensor) -> float:
        parts = (
            mf.shard_tensor(x, layout, rank=self.comm.rank).to(self.comm.device)
            for x, layout in zip(inputs, self.layouts, strict=True)
        )
        return float(self.step(*parts)[0])

    def parameters(self) -> dict[str, Tensor]:
        """All ranks gather them whole."""
        fusion = self.program.fusion
        with mf.FusionDefinition("gather") as fd:
            for name, (shape, _) in PARAMETERS.items():
                layout = fusion.layout(name)
                w = fd.define_tensor(shape, mesh=layout.mesh, layout=layout, name=name)
                fd.add_output(fd.ops.set(w).on(layout.mesh, {}))
        parts = [self.step.state[name] for name in PARAMETERS]
        return dict(zip(PARAMETERS, mf.compile(fd).run(*parts), strict=True))


# -- training --------------------------------------------------------------------------------------


def train(step: Any, steps: int) -> list[float]:
    """The loss of each step."""
    losses: list[float] = []
    began = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}")
    with Progress(*columns, console=screen.output(), transient=True) as bar:
        task = bar.add_task("training", total=steps, told="")
        for n, (tokens, targets) in zip(range(1, steps + 1), batches(), strict=False):
            losses.append(step(tokens, targets, *angles(), torch.tensor(float(n))))
            rate = n * BATCH * LENGTH / (time.perf_counter() - began)
            bar.update(task, advance=1, told=f"loss {losses[-1]:.3f}, {rate:,.0f} bytes/s")
    return losses


class OneDevice:
    """The same steps by torch."""

    def __init__(self) -> None:
        self.leaves = {name: w.requires_grad_() for name, w in initial().items()}
        self.adamw = torch.optim.AdamW([*self.leaves.values()], lr=LR, weight_decay=DECAY)

    def __call__(self, tokens: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, _: Any) -> float:
        loss = loss_of(self.leaves, tokens, targets, (cos, sin))
        self.adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*self.leaves.values()], CLIP)
        self.adamw.step()
        return float(loss.detach())


def export(parameters: dict[str, Tensor], to: Path) -> None:
    """Let rank 0 write whole parameters to a file."""
    from safetensors.torch import save_file

    if screen.is_first():
        save_file({name: w.cpu().contiguous() for name, w in parameters.items()}, to)


def draw(curves: dict[str, list[float]], to: Path) -> str:
    """Draw the losses; return what was done."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "not drawn: matplotlib is not installed"
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss per byte")
    axes.legend()
    figure.savefig(to, bbox_inches="tight")
    return f"drawn: {to}"


def main() -> None:
    """Train on the mesh, then on one device, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axes, sizes: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="how many: %(default)s")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a batch: %(default)s")
    parser.add_argument("--sim", action="store_true", help="simulate, whoever started this process")
    parser.add_argument("--save", type=Path, help="a folder for the state; not where simulated")
    parser.add_argument("--export", type=Path, help="a safetensors file for the parameters")
    parser.add_argument(
        "--plot", type=Path, default=Path("train_llama.svg"), help="the curves: %(default)s"
    )
    arguments = parser.parse_args()
    console = screen.output()
    with screen.errors():
        mesh = parse_mesh(arguments.mesh)
        is_alone = arguments.sim or detect(os.environ).size == 1
        if is_alone and not screen.is_first():
            return
        kind = Simulated if is_alone else Launched
        step = kind(mesh, arguments.microbatches)
        losses = train(step, arguments.steps)
        if arguments.save and isinstance(step, Launched):
            step.step.save(arguments.save, portable=True)
        if arguments.export:
            export(step.parameters(), arguments.export)
    if not screen.is_first():
        return
    alone = train(OneDevice(), arguments.steps)
    apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    where = f"{mesh.size} simulated ranks" if is_alone else f"{mesh.size} ranks"
    console.print(f"{where}, {arguments.mesh}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    console.print(f"one device: {alone[0]:.4f} -> {alone[-1]:.4f}; at most {apart:.1e} apart")
    console.print(draw({f"{where}, {arguments.mesh}": losses, "one device": alone}, arguments.plot))


if __name__ == "__main__":
    main()
