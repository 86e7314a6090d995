"""Host time of replays: all that a run does, beside the replay of its graph alone.

python benchmarks/replays.py                       # one GPU, or this process and stand-ins
python benchmarks/replays.py --device cpu          # graphs that do nothing: what mdfuse adds
python benchmarks/replays.py --full --batch 8      # layers of 8B (on a GPU)

Three programs: a layer with 12 inputs that stay where they are, a training step of layers, and a
step of `examples/generate.py`, which holds its state. Without a GPU a graph is a stand-in whose
replay does nothing, so that what is left is the host's work; the time is that of the processor.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _layers_figures import Plan, bench
from _layers_models import Case, cases
from _layers_peers import options, ours
from _measure import Contender, Report, Row, host_time, interleave, processor_time, show
from _ranks import Ranks, start_or_alone
from _replays_stand_in import stand_in
from _stacks import stacked
from _training_steps import STEPS, net_of

import mdfuse as mf
from mdfuse.cli import screen
from mdfuse.plan.graphs import GraphPlan

_RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A program whose runs replay one graph.

    Attributes:
        name: of the row.
        inputs: how many tensors a run takes.
        call: one run.
        alone: the replay of its graph, and nothing else.
    """

    name: str
    inputs: int
    call: Callable[[], object]
    alone: Callable[[], object]


def _replayed(name: str, program: mf.Program, call: Callable[[], object]) -> Replayed:
    """A program after as many runs as it takes until nothing is captured any more.

    Raises:
        AssertionError: not all of it is captured, or it is captured anew.
    """
    for _ in range(8):
        call()
    plan = program.plans.recent
    if not isinstance(plan, GraphPlan) or any(r.eager for r in plan.regions):
        raise AssertionError(f"{name}: not all of it is replayed\n{program.explain()}")
    replay = plan.replays()
    return Replayed(name=name, inputs=len(program.host.inputs), call=call, alone=replay[-1].replay)


def _layer(plan: Plan, case: Case) -> Replayed:
    """A layer, forward."""
    layer = bench(plan, case)
    call = ours(layer)
    return _replayed(f"{case.name}: a layer", layer.programs[-1], call)


def _training(plan: Plan, case: Case, layers: int) -> Replayed:
    """Forward, backward and AdamW of some layers."""
    net = net_of(stacked(bench(plan, case), layers), "alone")
    step = STEPS["alone"]["mdfuse"](net)
    name = f"{case.name}: a training step, layers: {layers}"
    return _replayed(name, net.stack.layer.programs[-1], step.call)


def _generating(plan: Plan) -> Replayed:
    """A token more by a small Llama with random weights."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    example: Any = importlib.import_module("generate")
    engine, _ = example.opened_with(plan.ranks.mesh, None, plan.options)
    of_engine = engine.programs
    step = torch.zeros(of_engine.without_chunk.size, dtype=torch.int64)
    call = partial(of_engine.steps[False], step)
    return _replayed("generate.py: a token", of_engine.programs[False], call)


def rows(plan: Plan, case: Case, layers: int, batch: int) -> Iterator[Row]:
    """Each program beside its graph."""
    all_rows = (
        partial(_layer, plan, case),
        partial(_training, plan, case, layers),
        partial(_generating, plan),
    )
    for make in all_rows:
        one = make()
        times = interleave(
            {"ours": Contender(call=one.call), "alone": Contender(call=one.alone)},
            rounds=plan.rounds,
            batch=batch,
            settle=plan.ranks.settle,
            stopwatch=host_time if plan.is_gpu else processor_time,
        )
        yield Row(
            name=one.name,
            sizes=f"{one.inputs} inputs",
            unit="us",
            ours=times["ours"],
            against=times["alone"],
            alternative="replay alone",
            kind="added",
            limit=None,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--full", action="store_true", help="layers of 8B; else small ones")
    parser.add_argument("--layers", type=int, help="of the training step: 2, or 1 of 8B")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--batch", type=int, help="runs in a turn: 2000, on a GPU 32")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    ranks: Ranks = start_or_alone(arguments.device)
    is_gpu = ranks.device.type == "cuda"
    if not is_gpu:
        stand_in()
    plan = Plan(
        ranks=ranks, rounds=arguments.rounds, peers=(), options=options(None), compiler="inductor"
    )
    (case,) = cases(["llama3-8b"], "prefill", None, 0, is_small=not arguments.full)
    layers = arguments.layers or (1 if arguments.full else 2)
    batch = arguments.batch or (32 if is_gpu else 2000)
    all_rows = list(rows(plan, case, layers, batch))
    name = "gpu" if is_gpu else "stand-in"
    path: Path = arguments.output or _RESULTS / f"replays-{name}.json"
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    where = {"device": str(ranks.device), "batch": batch, "layers": layers}
    show(screen.output(), f"host time of replays ({name})", all_rows)
    Report(benchmark="replays", arguments=given, rows=all_rows, where=where).write(path)
    screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
