"""Finetune a language model of transformers: a folder with a config, and safetensors, on a text.

python examples/finetune.py FOLDER LICENSE --lora 8                              # in one process
python examples/finetune.py FOLDER LICENSE --simulate --mesh fsdp=2,tp=2         # 4 ranks of it
torchrun --nproc-per-node 4 examples/finetune.py FOLDER TEXT --mesh fsdp=4 --recompute
torchrun --nproc-per-node 4 examples/finetune.py FOLDER TEXT --mesh fsdp=2,tp=2 --save state
torchrun --nproc-per-node 2 examples/finetune.py FOLDER TEXT --mesh fsdp=2 --save state --resume
mdfuse launch -n 4 --respawn examples/finetune.py FOLDER TEXT --mesh fsdp=4 --save state

The module is what `AutoModelForCausalLM` makes of the folder, unchanged; without safetensors its
parameters are random. The text is read by the folder's tokenizer, or as bytes where it has none.
The axes of the mesh:

    dp      the batch is split; so it is along an axis of any other name
    fsdp    the batch is split, and so are parameters, masters and moments, until they are read
    tp      layers are split by the model's own plan, and activations between them by positions

A state (`step-N` in `--save`) is read on any mesh, and its parameters by `model.load`. The rate and
the batch of a step follow from its number. Under `mdfuse launch` ranks outlive others.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import mdfuse as mf
from mdfuse.bootstrap import RESPAWNED, detect
from mdfuse.cli import screen
from mdfuse.cli.program_file import parse_mesh


def module_of(folder: Path, dtype: str | None, is_read: bool) -> nn.Module:
    """Return the model of a folder; without numbers if they are read later, part by part."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    chosen = getattr(torch, dtype) if dtype else config.dtype or torch.float32
    torch.manual_seed(0)  # random parameters are those of all ranks
    with torch.device("meta" if is_read else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=chosen)


def tokens_of(folder: Path, text: Path, length: int, vocabulary: int) -> Tensor:
    """Return a text as tokens of the folder's tokenizer, or as bytes."""
    if any(folder.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokens = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    else:
        tokens = [*text.read_bytes()]
    if len(tokens) < length or max(tokens) >= vocabulary:
        size = f"{len(tokens)} tokens up to {max(tokens, default=0)}"
        screen.fail(f"{text} has {size}: --length is {length}, the vocabulary {vocabulary}")
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


def imported(module: nn.Module, mesh: mf.DeviceMesh, a: argparse.Namespace) -> Any:
    """Import the module: its plan along tp, everything split along fsdp, the batch along both."""
    plan = mf.from_plan(module, sequence=1) if "tp" in mesh.axes else {"layouts": {}}
    sharded = {"fsdp": mf.Shard(0)} if "fsdp" in mesh.axes else {}
    layouts = {
        name: where if name.startswith(("activation:", "argument:")) else {**where, **sharded}
        for name, where in plan.pop("layouts").items()
    }
    rows = {axis: mf.Shard(0) for axis in mesh.axes if axis != "tp"}
    layouts |= {"*": sharded, "input:*": rows}
    ids = mf.TensorSpec((a.batch, a.length), torch.int64)
    return mf.from_torch(
        module, kwargs={"input_ids": ids, "labels": ids, "use_cache": False},
        mesh=mesh, layouts=layouts, gather=[*sharded], recompute=a.recompute,
        adapters={a.targets: (a.lora, 2 * a.lora)} if a.lora else None, **plan,
    )  # fmt: skip


def training(module: nn.Module, model: Any, a: argparse.Namespace) -> mf.TrainingStep:
    """Return forward, the module's own loss, backward, and AdamW; vectors do not decay."""
    small = {name for name, w in module.named_parameters() if w.ndim < 2 or "bias" in name}
    small &= {*model.fusion.inputs} if not a.lora else set()  # adapters are matrices
    adamw = partial(mf.optim.adamw, weight_decay=a.decay)
    return model.training_step(
        optimizer=mf.optim.groups(adamw, {name: {"weight_decay": 0.0} for name in small}),
        clip=a.clip, master=True, skip_nonfinite=True, microbatches=a.microbatches,
    )  # fmt: skip


def simulated(step: mf.TrainingStep, weights: list[Any], data: Any) -> Iterator[tuple[int, Any]]:
    """Yield each step of all ranks in this process, as `mf.Run` does on one of them."""
    program, state = step.compile(), step.state(weights)
    for n in itertools.takewhile(data, itertools.count(1)):
        outputs = mf.simulate(program, step.arguments(weights, state, *data(n))).outputs
        state = step.updated(outputs)
        yield n, outputs


def check_states(folder: Path | None, is_resumed: bool) -> None:
    """Refuse a folder with states that are not asked for, or without those that are."""
    count = len([*folder.glob("step-*/.metadata")]) if folder else 0
    if bool(count) != is_resumed and RESPAWNED not in os.environ:
        screen.fail(f"{folder} has {count or 'no'} states: --resume goes on, and needs one")


def train(a: argparse.Namespace) -> tuple[list[float], Any]:
    """Train; return the losses that were printed, and what made the steps."""
    mesh, console, losses, names = parse_mesh(a.mesh), screen.output(), list[float](), list[str]()
    is_simulated = a.simulate or (detect(os.environ).size == 1 < mesh.size)
    if a.save and is_simulated:
        screen.fail("--save: simulated ranks keep nothing; start them by a launcher")
    check_states(a.save, a.resume)
    source = a.folder if any(a.folder.glob("*.safetensors")) else None
    module = module_of(a.folder, a.dtype, is_read=source is not None)
    tokens = tokens_of(a.folder, a.text, a.length, module.config.vocab_size)

    def build(mesh: mf.DeviceMesh) -> Any:
        model = imported(module, mesh, a)
        step = training(module, model, a)
        console.print(*([model.report()] * a.report), step.report(), sep="\n", soft_wrap=True)
        names[:] = step.inputs[2:]
        return step, lambda comm: model.load(source, comm=comm)  # a rank reads its parts

    def batch(n: int) -> Any:
        ids = batch_of(tokens, n, a.batch, a.length)
        numbers = {"lr": torch.tensor(rate(n, a)), "seed": n}  # of the optimizer, and of dropout
        return None if n > a.steps else (ids, ids, *(numbers[x] for x in names))

    run = mf.Run(build, mesh, batch, save_every=a.save_every, folder=a.save, keep=a.keep)
    before: Any = None
    if is_simulated:
        step, begin = build(mesh)
    for n, (loss, norm, *_) in simulated(step, begin(None), batch) if is_simulated else run:
        if (n % a.every == 0 or n == a.steps) and loss is not None:  # None: no rank of the mesh
            losses.append(float(loss))
            stats = f"; {before.stats()}" if before and before is run.running else ""
            line = f"step {n}: loss {losses[-1]:.4f}, norm {float(norm):.3g}, lr {rate(n, a):.2e}"
            if is_simulated or run.comm.rank == run.mesh.first:  # another one where that one dies
                print(line + stats, flush=True)
            before = run.running
    return losses, run.running


def main(given: list[str] | None = None) -> Any:
    """Train as the command line says; return what `train` does."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
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
    add("--dtype", choices=("float32", "bfloat16"), help="beside masters in f32; or the config's")
    add("--lr", type=float, default=1e-4, help="the highest learning rate: %(default)s")
    add("--warmup", type=int, default=5, help="steps to reach it: %(default)s")
    add("--decay", type=float, default=0.1, help="of matrices: %(default)s")
    add("--clip", type=float, default=1.0, help="the norm of all gradients: %(default)s")
    add("--report", action="store_true", help="say where parameters live, and what is gathered")
    add("--every", type=int, default=1, help="steps between lines: %(default)s")
    add("--save", type=Path, help="a folder for the states")
    add("--save-every", type=int, default=100, help="steps between states: %(default)s")
    add("--keep", type=int, default=3, help="states that stay: %(default)s")
    add("--resume", action="store_true", help="begin with the last state in --save")
    a = parser.parse_args(given)
    with screen.errors():
        return train(a) if screen.is_first() or not a.simulate else None


if __name__ == "__main__":
    main()
