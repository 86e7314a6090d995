"""Continue a text by the Llama of train_llama.py, a byte a step: one program, one plan.

python examples/train_llama.py --mesh tp=2 --steps 300 --sim --export model.safetensors
python examples/generate.py --checkpoint model.safetensors --prompt "You may"    # simulates 2 ranks
torchrun --nproc-per-node 4 examples/generate.py --mesh tp=2,sp=2 --checkpoint model.safetensors
mdfuse dump examples/generate.py --mesh tp=2,sp=2                                # what a step does

The program holds its state: keys and values of all positions so far, the last byte, and how many
there were. A step writes the keys and values of one position where they belong, appends the most
probable byte, and counts. Nothing of it depends on how far it has come, so all steps run one plan,
on GPUs one CUDA graph. The axes of the mesh say where things are:

    tp      heads, hidden units and the table of bytes are split
    sp      keys and values are split by positions
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress, TextColumn
from torch import Tensor
from train_llama import (
    HEAD,
    HEADS,
    KV_HEADS,
    LAYER,
    LAYERS,
    PARAMETERS,
    WIDTH,
    initial,
    rotated,
    split_of,
)

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.cli.program_file import parse_mesh

#: How many positions there is room for.
ROOM = 512


def angles() -> tuple[Tensor, Tensor]:
    """Cosines and sines for all positions."""
    speeds = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    found = torch.outer(torch.arange(ROOM, dtype=torch.float64), speeds).repeat(1, 2)
    return found.cos().float(), found.sin().float()


def define(mesh: DeviceMesh) -> mf.FusionDefinition:
    """A step: what it reads besides parameters and angles it writes in place."""
    heads = {"tp": Shard(1)} if "tp" in mesh.axes else {}
    positions = {"sp": Shard(2)} if "sp" in mesh.axes else {}
    with mf.FusionDefinition("generate") as fd:
        cos, sin = (fd.define_tensor([ROOM, HEAD], mesh=mesh, name=name) for name in ("cos", "sin"))
        p = {
            name: fd.define_tensor(shape, mesh=mesh, layout=split_of(mesh, split), name=name)
            for name, (shape, split) in PARAMETERS.items()
        }
        token = fd.define_tensor([1, 1], torch.int64, mesh, name="token")
        at = fd.define_tensor([1], torch.int64, mesh, name="at")
        shape, where = [1, KV_HEADS, ROOM, HEAD], {**heads, **positions}
        caches = {
            f"{kind}.{n}": fd.define_tensor(
                shape, mesh=mesh, layout=where, name=f"{kind}.cache.{n}"
            )
            for n in range(LAYERS)
            for kind in "kv"
        }
        rotary = [x.index_select(0, at) for x in (cos, sin)]
        seen = fd.ops.arange(ROOM) <= at
        h = F.embedding(token, p["table"])
        for n in range(LAYERS):
            w = {name: p[f"{name}.{n}"] for name in LAYER}
            x = F.rms_norm(h, (WIDTH,), w["norm_1"], 1e-5)
            q, k, v = (F.linear(x, w[m]).view(1, 1, -1, HEAD).transpose(1, 2) for m in "qkv")
            q, k = (rotated(y, *rotary) for y in (q, k))
            news = [caches[f"{m}.{n}"].index_copy(2, at, y) for m, y in (("k", k), ("v", v))]
            h = h + F.linear(attention(q, *news, seen), w["o"])
            x = F.rms_norm(h, (WIDTH,), w["norm_2"], 1e-5)
            h = h + F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"]), w["down"])
            for m, new in zip("kv", news, strict=True):
                fd.add_output(new, reuse=caches[f"{m}.{n}"])
        logits = F.linear(F.rms_norm(h, (WIDTH,), p["norm"], 1e-5), p["head"])
        fd.add_output(logits.argmax(-1), reuse=token)
        fd.add_output(at + 1, reuse=at)
    return fd


def attention(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Of one position to those seen so far; each head of keys serves several of queries."""
    q = q.view(1, KV_HEADS, HEADS // KV_HEADS, HEAD)
    scores = (q @ k.mT * HEAD**-0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).reshape(1, 1, -1)


def initial_state() -> dict[str, Tensor]:
    """Nothing so far."""
    shape = [1, KV_HEADS, ROOM, HEAD]
    caches = {f"{m}.cache.{n}": torch.zeros(shape) for n in range(LAYERS) for m in "kv"}
    token, at = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return {"token": token, "at": at, **caches}


def parameters(checkpoint: Path | None) -> dict[str, Tensor]:
    """Those of a file, or random ones."""
    if checkpoint is None:
        return initial()
    from safetensors.torch import load_file

    return load_file(checkpoint)


def whole(checkpoint: Path | None) -> dict[str, Tensor]:
    """All inputs by name."""
    cos, sin = angles()
    return {"cos": cos, "sin": sin, **parameters(checkpoint), **initial_state()}


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[Tensor]]:
    """The first step, for `mdfuse dump` and `mdfuse run`."""
    fd = define(mesh)
    given = whole(None)
    return fd, [given[name] for name in fd.fusion.inputs]


class Simulated:
    """Steps of all ranks in this process."""

    def __init__(self, mesh: DeviceMesh, checkpoint: Path | None) -> None:
        self.program, self.given = mf.compile(define(mesh)), whole(checkpoint)

    def __call__(self, token: int | None) -> int:
        """Return the byte behind the ones so far, of which this is the last (None: that made)."""
        if token is not None:
            self.given["token"] = torch.tensor([[token]])
        fusion = self.program.fusion
        made = mf.simulate(self.program, [self.given[name] for name in fusion.inputs]).outputs
        for name, x in zip(fusion.outputs, made, strict=True):
            self.given[fusion.reuse[name]] = x
        return int(self.given["token"])


class Launched:
    """Steps of this rank, beside those of the others."""

    def __init__(self, mesh: DeviceMesh, checkpoint: Path | None) -> None:
        comm, self.program = mf.init(), mf.compile(define(mesh))
        fusion, given = self.program.fusion, whole(checkpoint)
        mine = {
            name: mf.shard_tensor(given[name], fusion.layout(name), rank=comm.rank).to(comm.device)
            for name in fusion.inputs
        }
        kept = {name: mine.pop(name) for name in initial_state()}
        self.step, self.others = mf.Step(self.program, kept), [*mine.values()]

    def __call__(self, token: int | None) -> int:
        """As `Simulated`; the byte comes to the host only where somebody asks for it."""
        if token is not None:
            self.step.state["token"].fill_(token)
        self.step(*self.others)
        return int(self.step.state["token"])


def generate(step: Any, prompt: bytes, count: int) -> bytes:
    """The bytes behind a prompt, each the most probable one."""
    found, began = bytearray(), time.perf_counter()
    with Progress(TextColumn("{task.description}"), console=screen.output(), transient=True) as bar:
        task = bar.add_task("", total=None)
        for token in prompt[:-1]:
            step(token)
        token = prompt[-1]
        for n in range(count):
            found.append(step(token))
            token = None
            rate = (n + 1) / (time.perf_counter() - began)
            bar.update(task, description=f"{n + 1} of {count} bytes, {rate:,.0f} a second")
    return bytes(found)


def main() -> None:
    """Print a prompt, and what follows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="tp=2", help="axes and their sizes")
    parser.add_argument("--checkpoint", type=Path, help="a safetensors file; random without one")
    parser.add_argument("--prompt", default="You may")
    parser.add_argument("--tokens", type=int, default=256, help="how many bytes follow")
    parser.add_argument("--sim", action="store_true", help="simulate, whoever started this process")
    arguments = parser.parse_args()
    prompt = arguments.prompt.encode()
    with screen.errors():
        if not prompt or arguments.tokens < 0 or len(prompt) + arguments.tokens > ROOM:
            screen.fail(f"a prompt of some bytes, and with what follows at most {ROOM}")
        mesh = parse_mesh(arguments.mesh)
        is_alone = arguments.sim or detect(os.environ).size == 1
        if is_alone and not screen.is_first():
            return
        step = (Simulated if is_alone else Launched)(mesh, arguments.checkpoint)
        text = generate(step, prompt, arguments.tokens)
    if screen.is_first():
        text = (prompt + text).decode(errors="replace")
        screen.output().print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
