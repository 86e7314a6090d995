"""Train the Llama of `train_llama.py` in stages: a pipeline, by any schedule.

python examples/pipeline.py --mesh pp=2,tp=2                         # simulates 4 ranks
python examples/pipeline.py --mesh pp=4 --schedule zb1p --microbatches 8
python examples/pipeline.py --mesh pp=2 --stages 4 --schedule interleaved
torchrun --nproc-per-node 4 examples/pipeline.py --mesh pp=2,dp=2 --steps 100

Along `pp` of the mesh lie the rank groups, each a mesh of the other axes: `dp` splits the batch,
`tp` heads and hidden units. Each half of a layer may be a stage. `--schedule` is a name, or a CSV
file as `torch.distributed.pipelining` has them; the table is printed, and when each rank group
would be idle, before anything runs.

Afterwards the same steps are made on one device by torch, and the losses compared.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import train_llama as llama
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.cli.program_file import parse_mesh

#: Halves of layers: what lies on a stage is a number of them.
HALVES = 2 * llama.LAYERS


def groups_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The rank groups along `pp`, each a mesh of the other axes."""
    if "pp" not in mesh.axes:
        raise mf.debug.MeshError(
            f"{mesh} has no axis pp",
            because="stages lie on the rank groups along it",
            hint="for example --mesh pp=2,tp=2",
        )
    others = [a for a in mesh.axes if a != "pp"]
    ranks = torch.tensor(mesh.ranks).view([mesh.axis_size(a) for a in mesh.axes])
    parts = ranks.unbind(mesh.axis_index("pp"))
    return [DeviceMesh((x if others else x[None]).tolist(), axes=others or ("dp",)) for x in parts]


def turns(schedule: str) -> bool:
    """Return whether stages go down the rank groups and up again, not round and round."""
    return schedule in ("zbv", "dualpipev")


def places_of(groups: Sequence[DeviceMesh], stages: int, schedule: str) -> list[DeviceMesh]:
    """The mesh of each stage."""
    if not 1 <= stages <= HALVES:
        raise mf.debug.DefinitionError(
            f"{stages} stages",
            because=f"each has half a layer at least, and there are {llama.LAYERS} layers",
            hint=f"--stages from 1 to {HALVES}, and a mesh of fewer rank groups: --mesh pp=2",
        )
    order = [*groups, *reversed(groups)] if turns(schedule) else [*groups]
    return [order[s % len(order)] for s in range(stages)]


def define(places: Sequence[DeviceMesh]) -> mf.FusionDefinition:
    """Forward, backward, clipping and AdamW; stage s lies on `places[s]`."""
    first, last = places[0], places[-1]
    batch = {m: {"dp": Shard(0)} if "dp" in m.axes else {} for m in places}
    with mf.FusionDefinition("step") as fd:

        def data(name: str, mesh: DeviceMesh) -> Any:
            shape = [llama.BATCH, llama.LENGTH]
            return fd.define_tensor(shape, torch.int64, mesh, batch[mesh], name=name)

        rotary, count = {}, {}
        for n, m in enumerate(dict.fromkeys(places)):
            rotary[m] = [
                fd.define_tensor([llama.LENGTH, llama.HEAD], mesh=m, name=f"{name}.{n}")
                for name in ("cos", "sin")
            ]
            count[m] = fd.define_tensor([], mesh=m, name=f"count.{n}")
        tokens, targets = data("tokens", first), data("targets", last)
        params, moments = {}, {}
        for name, (shape, split) in llama.PARAMETERS.items():
            m = places[stage_of(name, len(places))]
            where = llama.split_of(m, split)
            params[name], *moments[name] = (
                fd.define_tensor(shape, mesh=m, layout=where, name=f"{name}{kind}")
                for kind in ("", ".mean", ".square")
            )
        h, at = F.embedding(tokens, params["table"]), 0
        for n in range(HALVES):
            stage = n * len(places) // HALVES
            if stage > at:
                at, m = stage, places[stage]
                h = fd.ops.set(h).on(m, batch[m])
            h = h + llama.half(params, n, h, rotary[places[stage]])
        loss = llama.judged(params, h, targets)
        grads, norm = mf.optim.clip_by_global_norm(mf.grad(loss, list(params.values())), llama.CLIP)
        fd.add_output(fd.ops.set(loss).on(first, {}))  # where it is printed
        fd.add_output(norm)
        for (name, w), dw in zip(params.items(), grads, strict=True):
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


def compiled(mesh: DeviceMesh, stages: int, microbatches: int, schedule: str) -> mf.Program:
    """The step, its batch in microbatches that go through the stages by a schedule."""
    places = places_of(groups_of(mesh), stages, schedule)
    table = mf.Schedule.from_csv(schedule) if schedule.endswith(".csv") else schedule
    batch = {"tokens": 0, "targets": 0}
    return mf.pipeline(define(places), microbatches=microbatches, batch=batch, schedule=table)


def inputs_of(program: mf.Program, tokens: Tensor, targets: Tensor, count: Tensor) -> list[Tensor]:
    """The inputs of a step but for the state: cosines, sines and the count on each rank group."""
    groups = sum(name.startswith("count.") for name in program.fusion.inputs)
    return [*[*llama.angles(), count] * groups, tokens, targets]


class Simulated(llama.Simulated):
    """Steps of all ranks in this process."""

    def __init__(self, program: mf.Program) -> None:
        self.program, self.state = program, llama.state()

    def __call__(self, tokens: Tensor, targets: Tensor, *others: Tensor) -> float:
        return super().__call__(*inputs_of(self.program, tokens, targets, others[-1]))


class Launched:
    """Steps of this rank, beside those of the others."""

    def __init__(self, program: mf.Program) -> None:
        self.comm, self.program, state = mf.init(), program, llama.state()
        names = program.fusion.inputs
        self.state = dict(zip(names[-len(state) :], state, strict=True))
        self.step = mf.Step(program, {n: self.part(n, x) for n, x in self.state.items()})

    def part(self, name: str, x: Tensor) -> Tensor | None:
        """This rank's part of an input; None where it has none."""
        layout = self.program.fusion.layout(name)
        if self.comm.rank not in layout.mesh:
            return None
        return mf.shard_tensor(x, layout, rank=self.comm.rank).to(self.comm.device).contiguous()

    def __call__(self, tokens: Tensor, targets: Tensor, *others: Tensor) -> float:
        inputs = inputs_of(self.program, tokens, targets, others[-1])
        names = self.program.fusion.inputs[: len(inputs)]
        loss, _ = self.step(*map(self.part, names, inputs))
        return float("nan") if loss is None else float(loss)  # only the first rank group has it


def build(mesh: DeviceMesh) -> tuple[mf.FusionDefinition, list[Tensor]]:
    """The first step, its batch at once, for `mdfuse dump` and `mdfuse run`."""
    groups = groups_of(mesh)
    fd = define(groups)
    data = [*llama.angles(), torch.tensor(1.0)] * len(groups)
    return fd, [*data, *next(llama.batches()), *llama.state()]


def main() -> None:
    """Train in stages, then on one device, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="pp=2,tp=2", help="axes, sizes: %(default)s; pp: stages")
    parser.add_argument(
        "--stages", type=int, help="how many: by default one on each rank group, or two (zbv)"
    )
    parser.add_argument("--schedule", default="1f1b", help="a name or a CSV file: %(default)s")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of a batch: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="how many: %(default)s")
    parser.add_argument("--sim", action="store_true", help="simulate, whoever started this process")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: a number from 1 on")
    if arguments.schedule.endswith(".csv") and not Path(arguments.schedule).is_file():
        parser.error(f"--schedule {arguments.schedule}: no such file")
    console = screen.output()
    with screen.errors():
        mesh = parse_mesh(arguments.mesh)
        is_alone = arguments.sim or detect(os.environ).size == 1
        if is_alone and not screen.is_first():
            return
        stages = arguments.stages
        if stages is None:
            stages = len(groups_of(mesh)) * (1 + turns(arguments.schedule))
        program = compiled(mesh, stages, arguments.microbatches, arguments.schedule)
        if screen.is_first():
            lines = program.schedule, program.schedule.timed()
            console.print(*map(str, lines), sep="\n\n", soft_wrap=True)
        step = Simulated(program) if is_alone else Launched(program)
        losses = llama.train(step, arguments.steps)
    if not screen.is_first():
        return
    alone = llama.train(llama.OneDevice(), arguments.steps)
    apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    where = f"{mesh.size} {'simulated ' * is_alone}ranks, {arguments.mesh}, {stages} stages"
    console.print(f"{where}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    console.print(f"one device: {alone[0]:.4f} -> {alone[-1]:.4f}; at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
