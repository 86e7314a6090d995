"""Train the Llama of `train_llama.py` in stages: a pipeline, by any schedule.

python examples/pipeline.py --mesh pp=2,tp=2                         # simulates 4 ranks
python examples/pipeline.py --mesh pp=4 --schedule zb1p --microbatches 8
python examples/pipeline.py --mesh pp=2 --stages 4 --schedule interleaved
torchrun --nproc-per-node 4 examples/pipeline.py --mesh pp=2,dp=2 --steps 100

Along `pp` of the mesh lie the rank groups, each a mesh of the other axes: `dp` splits the batch,
`tp` heads and hidden units. Each half of a layer may be a stage, so there are 1, 2 or 4. `--schedule`
is a name, or a file of `torch.distributed.pipelining`: what it says is printed, with the time that
each rank group will be idle, before anything runs.

Afterwards the same steps are made on one device by torch, and the losses compared.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import train_llama as llama
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.cli.execution import local_inputs
from mdfuse.cli.program_file import parse_mesh

HALVES = 2 * llama.LAYERS


def groups_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The rank groups along `pp`, each a mesh of the other axes."""
    if "pp" not in mesh.axes:
        raise mf.MeshError(
            f"{mesh} has no axis pp",
            because="stages lie on the rank groups along it",
            hint="for example --mesh pp=2,tp=2",
        )
    others = [a for a in mesh.axes if a != "pp"]
    ranks = torch.tensor(mesh.ranks).view([mesh.axis_size(a) for a in mesh.axes])
    parts = ranks.unbind(mesh.axis_index("pp"))
    return [DeviceMesh((x if others else x[None]).tolist(), axes=others or ("dp",)) for x in parts]


def places_of(groups: Sequence[DeviceMesh], stages: int, schedule: str) -> list[DeviceMesh]:
    """The mesh of each stage: round the groups, or down and up again, as the schedule has it."""
    turns = schedule in ("zbv", "dualpipev")
    count = len(groups)
    order = [*range(count), *reversed(range(count))] if turns else [*range(count)]
    return [groups[order[s % len(order)]] for s in range(stages)]


def define(places: Sequence[DeviceMesh]) -> mf.FusionDefinition:
    """Forward, backward, clipping and AdamW; stage s lies on `places[s]`."""
    first, last = places[0], places[-1]
    batch = {m: {"dp": Shard(0)} if "dp" in m.axes else {} for m in places}
    with mf.FusionDefinition("step") as fd:

        def data(name: str, mesh: DeviceMesh) -> Any:
            shape = [llama.BATCH, llama.LENGTH]
            return fd.define_tensor(shape, torch.int64, mesh, batch[mesh], name=name)

        tokens, targets = data("tokens", first), data("targets", last)
        rotary, count = {}, {}
        for n, m in enumerate(dict.fromkeys(places)):
            rotary[m] = [
                fd.define_tensor([llama.LENGTH, llama.HEAD], mesh=m, name=f"{name}.{n}")
                for name in ("cos", "sin")
            ]
            count[m] = fd.define_tensor([], mesh=m, name=f"count.{n}")
        own, moments = {}, {}
        for name, (shape, split) in llama.PARAMETERS.items():
            m = places[stage_of(name, len(places))]
            where = llama.split_of(m, split)
            own[name], *moments[name] = (
                fd.define_tensor(shape, mesh=m, layout=where, name=f"{name}{kind}")
                for kind in ("", ".mean", ".square")
            )
        h, at = F.embedding(tokens, own["table"]), 0
        for n in range(HALVES):
            stage = n * len(places) // HALVES
            if stage > at:
                at, m = stage, places[stage]
                h = fd.ops.set(h).on(m, batch[m])
            h = h + llama.half(own, n, h, rotary[places[stage]])
        loss = llama.judged(own, h, targets)
        grads, _ = mf.optim.clip_by_global_norm(mf.grad(loss, list(own.values())), llama.CLIP)
        fd.add_output(fd.ops.set(loss).on(first, {}))
        for (name, w), dw in zip(own.items(), grads, strict=True):
            olds, m = (w, *moments[name]), places[stage_of(name, len(places))]
            news = mf.optim.adamw(w, dw, *olds[1:], count[m], lr=llama.LR, weight_decay=llama.DECAY)
            for new, old in zip(news, olds, strict=True):
                fd.add_output(new, reuse=old)
    return fd


def stage_of(name: str, stages: int) -> int:
    """The stage of a parameter: that of its half of a layer; the table's is the first one."""
    kind, _, layer = name.partition(".")
    n = 2 * int(layer) + (kind in llama.SECOND) if layer else 0 if name == "table" else HALVES - 1
    return n * stages // HALVES
