"""Finetune a language model of transformers: a folder with a config, and safetensors, on a text.

python examples/finetune.py FOLDER LICENSE --lora 8                              # in one process
python examples/finetune.py FOLDER LICENSE --simulate --mesh fsdp=2,tp=2         # 4 ranks of it
torchrun --nproc-per-node 4 examples/finetune.py FOLDER TEXT --mesh fsdp=4 --recompute
torchrun --nproc-per-node 4 examples/finetune.py FOLDER TEXT --mesh fsdp=2,tp=2 --microbatches 2 \
    --save state --save-every 100                                                # and go on:
torchrun --nproc-per-node 2 examples/finetune.py FOLDER TEXT --mesh fsdp=2 --save state --resume

The module is what `AutoModelForCausalLM` makes of the folder, unchanged; without safetensors its
parameters are random. The text is read by the folder's tokenizer, or as bytes where it has none.
The axes of the mesh:

    dp      the batch is split
    fsdp    the batch is split, and so are parameters, masters and moments, until they are read
    tp      layers are split by the model's own plan, and activations between them by positions

A state that was saved is read on any mesh, by the same arguments otherwise.
"""

from __future__ import annotations

import argparse
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.cli.program_file import parse_mesh


def weights_of(folder: Path) -> Path | None:
    """Return the folder if there are safetensors in it."""
    return folder if any(folder.glob("*.safetensors")) else None


def module_of(folder: Path, dtype: str | None) -> nn.Module:
    """Return the model of a folder: without numbers where these are read later, part by part."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    chosen = getattr(torch, dtype) if dtype else config.dtype or torch.float32
    torch.manual_seed(0)  # random parameters are those of all ranks
    with torch.device("meta" if weights_of(folder) else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=chosen)


def tokens_of(folder: Path, text: Path, vocabulary: int) -> Tensor:
    """Return a text as tokens of the folder's tokenizer, or as bytes."""
    if any(folder.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokens = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    else:
        tokens = [*text.read_bytes()]
    if max(tokens, default=0) >= vocabulary:
        screen.fail(f"token {max(tokens)} of {text}, and a vocabulary of {vocabulary}")
    return torch.tensor(tokens)


def batch_of(tokens: Tensor, step: int, rows: int, length: int) -> Tensor:
    """Return the batch of a step, [rows, length]: stretches of the text, the same on all ranks."""
    draws = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - length + 1, (rows, 1), generator=draws)
    return tokens[starts + torch.arange(length)]


def rate(step: int, a: argparse.Namespace) -> float:
    """Return the learning rate of a step from 1: a linear warm-up, then a cosine to a tenth."""
    if step <= a.warmup:
        return a.lr * step / a.warmup
    done = (step - a.warmup) / max(1, a.steps - a.warmup)
    return a.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


# -- the step --------------------------------------------------------------------------------------


def imported(module: nn.Module, mesh: DeviceMesh, a: argparse.Namespace) -> Any:
    """Import the module: its plan along tp, everything split along fsdp, the batch along both."""
    plan = mf.from_plan(module, sequence=1) if "tp" in mesh.axes else {"layouts": {}}
    sharded = {"fsdp": Shard(0)} if "fsdp" in mesh.axes else {}
    layouts = {
        name: where if name.startswith(("activation:", "argument:")) else {**where, **sharded}
        for name, where in plan.pop("layouts").items()
    }
    rows = {axis: Shard(0) for axis in ("dp", "fsdp") if axis in mesh.axes}
    layouts |= {"*": sharded, "input:*": rows}
    ids = mf.TensorSpec((a.batch, a.length), torch.int64)
    return mf.from_torch(
        module, kwargs={"input_ids": ids, "labels": ids, "use_cache": False},
        mesh=mesh, layouts=layouts, gather=[*sharded], recompute=a.recompute,
        adapters={a.targets: (a.lora, 2 * a.lora)} if a.lora else None, **plan,
    )  # fmt: skip


def training(module: nn.Module, model: Any, a: argparse.Namespace) -> mf.TrainingStep:
    """Return forward, the module's own loss, backward, and AdamW; vectors do not decay."""
    optimizer: Any = partial(mf.optim.adamw, weight_decay=a.decay)
    small = {name for name, w in module.named_parameters() if w.ndim < 2 or "bias" in name}
    if not a.lora:
        without = {name: {"weight_decay": 0.0} for name in model.fusion.inputs if name in small}
        optimizer = mf.optim.groups(optimizer, without)
    return model.training_step(
        optimizer=optimizer, clip=a.clip, master=True, skip_nonfinite=True,
        microbatches=a.microbatches,
    )  # fmt: skip


class Simulated:
    """Steps of all ranks in this process."""

    def __init__(self, step: mf.TrainingStep, model: Any, folder: Path) -> None:
        self.step, self.program = step, step.compile()
        self.weights = model.load(weights_of(folder))
        self.state = step.state(self.weights)

    def __call__(self, *inputs: Any) -> Tensor:
        given = self.step.arguments(self.weights, self.state, *inputs)
        outputs = mf.simulate(self.program, given).outputs
        self.state = self.step.updated(outputs)
        return outputs[0]


class Launched:
    """Steps of this rank, beside those of the others."""

    def __init__(self, step: mf.TrainingStep, model: Any, folder: Path) -> None:
        self.comm = mf.init()
        self.running = step.start(model.load(weights_of(folder), comm=self.comm))

    def __call__(self, ids: Tensor, labels: Tensor, *numbers: Any) -> Tensor:
        return self.running(*self.running.shard(ids, labels), *numbers)[0]


def newest(folder: Path) -> int:
    """Return the last step of which a whole state was saved."""
    steps = [int(p.parent.name.split("-")[1]) for p in folder.glob("step-*/.metadata")]
    return max(steps) if steps else screen.fail(f"--resume: no state is in {folder}")


def train(a: argparse.Namespace) -> tuple[list[float], Any]:
    """Train; return the losses that were printed, and what made the steps."""
    mesh, console, losses = parse_mesh(a.mesh), screen.output(), list[float]()
    module = module_of(a.folder, a.dtype)
    tokens = tokens_of(a.folder, a.text, module.config.vocab_size)
    if len(tokens) < a.length:
        screen.fail(f"{a.text} has {len(tokens)} tokens, and --length is {a.length}")
    model = imported(module, mesh, a)
    step = training(module, model, a)
    console.print(model.report(), step.report(), sep="\n")
    is_simulated = a.simulate or detect(os.environ).size != mesh.size
    made = (Simulated if is_simulated else Launched)(step, model, a.folder)
    if a.save and is_simulated:
        screen.fail("--save: simulated ranks have no state of their own; start them by torchrun")
    first = newest(a.save) if a.resume else 0
    if a.resume:
        made.running.load(a.save / f"step-{first}")
    for n in range(first + 1, a.steps + 1):
        ids, numbers = batch_of(tokens, n, a.batch, a.length), {"lr": rate(n, a), "seed": n}
        loss = made(ids, ids, *(torch.tensor(numbers[x]) for x in step.inputs[2:]))
        if n % a.every == 0 or n == a.steps:
            losses.append(float(loss))
            stats = f"; {made.running.stats()}" if not is_simulated and n > first + 1 else ""
            console.print(f"step {n}: loss {losses[-1]:.4f}, lr {numbers['lr']:.2e}{stats}")
        if a.save and (n % a.save_every == 0 or n == a.steps):
            made.running.save(a.save / f"step-{n}", portable=True)
    return losses, made


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="a model of transformers: config.json, safetensors, tokenizer")
    add("text", type=Path, help="a file of text")
    add("--mesh", default="fsdp=1", help="axes, sizes: %(default)s")
    add("--simulate", action="store_true", help="all ranks in this process")
    add("--steps", type=int, default=30, help="the last step: %(default)s")
    add("--batch", type=int, default=8, help="rows of all ranks: %(default)s")
    add("--length", type=int, default=128, help="tokens of a row: %(default)s")
    add("--microbatches", type=int, default=1, help="parts of a batch: %(default)s")
    add("--recompute", nargs="?", const="model.layers.*", help="submodules; layers: %(const)s")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank alone")
    add("--targets", default="*_proj", help="the layers with adapters: %(default)s")
    add("--dtype", help="of parameters (of 16 bits: with masters in f32); the config's by default")
    add("--lr", type=float, default=1e-4, help="the highest learning rate: %(default)s")
    add("--warmup", type=int, default=5, help="steps to reach it: %(default)s")
    add("--decay", type=float, default=0.1, help="of matrices: %(default)s")
    add("--clip", type=float, default=1.0, help="the norm of all gradients: %(default)s")
    add("--every", type=int, default=1, help="steps between lines: %(default)s")
    add("--save", type=Path, help="a folder for the states")
    add("--save-every", type=int, default=100, help="steps between states: %(default)s")
    add("--resume", action="store_true", help="begin with the last state in --save")
    return parser.parse_args(given)


def main() -> None:
    """Train as the command line says."""
    a = arguments()
    with screen.errors():
        is_alone = a.simulate or detect(os.environ).size == 1
        if not is_alone or screen.is_first():
            train(a)


if __name__ == "__main__":
    main()
