"""A training step of whole layers: mdfuse against torch's autograd and fused AdamW.

python benchmarks/training.py                                              # one GPU
python benchmarks/training.py --model llama3-8b --tokens 4096              # some
./launch/torchrun 2 benchmarks/training.py --parallel dp                   # sequences split
./launch/torchrun 2 benchmarks/training.py --parallel tp                   # heads and units split
python benchmarks/training.py --device cpu --small --compiler aot_eager    # to see that it runs

A step is the layers' forward, their backward from a given gradient of the output to that of the
input and of all weights, and AdamW's update of the weights in place; weights and moments have 16
bits on a GPU. Contenders: eager (autograd, `torch.optim.AdamW(fused=True)`), compiled (the layers
under torch.compile), with all-reduces by hand where heads are split; where sequences are, ddp
(`DistributedDataParallel`) and ddp-compiled, and mdfuse without buckets; and where the name ends in
graph, the whole step captured by hand as a CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from _layers_figures import Limits, Plan, Ready, bench, figures, settled
from _layers_models import MODELS, Case, cases
from _layers_peers import options
from _measure import Report, Row, show
from _ranks import Ranks, start_or_alone
from _stacks import stacked
from _training_steps import STEPS, Net, Step, Style, net_of, reference, steady_of
from torch import Tensor

import mdfuse as mf
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"

#: On one GPU, where communication is out of the picture; and on several.
_ALONE = Limits(times={"compiled-graph": 1.03, "graph": 1.0}, host_us=40.0, inputs=None)
_SPREAD = Limits(
    times=dict.fromkeys(("ddp", "ddp-compiled", "graph", "compiled", "compiled-graph"), 1.03),
    host_us=0.0, inputs=0, on_ranks=True,
)  # fmt: skip

#: dtype -> the largest error of any tensor of a step, relative to its norm, for each layer.
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}


def _error(net: Net, step: Step, call: Callable[[], Any], want: Mapping[str, Tensor]) -> float:
    """The largest one of a first step, taken as all others will be.

    Raises:
        AssertionError: something is wrong.
    """
    for x in call():
        x.fill_(torch.nan)  # the memory that the next results get, as a rule
    step.reset(net)
    y, dx = call()
    got, largest = {**step.state, "y": y, "dx": dx / step.times}, 0.0
    tolerance = _TOLERANCE[y.dtype] * net.stack.count
    for name, right in want.items():
        norm = torch.linalg.vector_norm
        error = float(norm(got[name].double() - right) / norm(right))
        if not error < tolerance:
            of = net.stack.layer.case.name
            raise AssertionError(f"{of}: a relative error of {error:.2g} in {name}")
        largest = max(largest, error)
    return largest


def rows(plan: Plan, case: Case, style: Style, layers: int) -> Iterator[Row]:
    """The figures of a stack of layers: mdfuse against every other contender.

    What cannot be captured together with its communications is left out.
    """
    model, size = case.model, plan.ranks.comm.size
    if style == "tp" and (model.kv_heads % size or model.hidden % size):
        screen.fail(
            f"{case.name}: {model.kv_heads} heads, {model.hidden} hidden units on {size} ranks"
        )
    torch.compiler.reset()  # else the layers before count as recompilations
    sequences = size if style == "dp" else 1
    net = net_of(stacked(bench(plan, case), layers, sequences), style)
    want, ready = reference(net), {}
    steps = {name: STEPS[style][name](net) for name in plan.peers}  # what graphs read
    for name, step in steps.items():
        step.reset(net)
        try:
            steady, peak = settled(plan, step.call, steady_of(name))
        except RuntimeError as error:
            if style == "alone" or not name.endswith("graph"):
                raise
            plan.left_out[f"{case.name}: {name}"] = f"{type(error).__name__}: {error}"
            continue
        ready[name] = Ready(call=steady, peak=peak, error=_error(net, step, steady, want))
    del want
    yield from figures(plan, case, ready)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[m.name for m in MODELS], nargs="+", help="some of them")
    parser.add_argument("--parallel", choices=get_args(Style)[1:], help="how ranks share the work")
    parser.add_argument("--layers", type=int, help="after each other; 1, and 2 on several ranks")
    parser.add_argument("--tokens", type=int, help="of a sequence")
    parser.add_argument("--peers", help="some of the contenders; by default all")
    parser.add_argument("--compile", choices=("auto", "never", "always"), help="mdfuse's option")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--small", action="store_true", help="layers of some thousand weights")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def _style(parallel: str | None, ranks: Ranks) -> Style:
    """Return how the ranks share the work; several ranks need a choice."""
    if (ranks.comm.size > 1) == (parallel is None):
        screen.fail("--parallel dp or --parallel tp is for several ranks, which need one of them")
    style: Style = "tp" if parallel == "tp" else "dp" if parallel else "alone"
    return style


def _plan(arguments: argparse.Namespace, ranks: Ranks, style: Style) -> Plan:
    """With the contenders that there are here."""
    is_gpu = ranks.device.type == "cuda"
    possible = [name for name in STEPS[style] if is_gpu or not name.endswith("graph")]
    peers = possible if arguments.peers is None else ["mdfuse", *arguments.peers.split(",")]
    if wrong := [name for name in peers if name not in possible]:
        screen.fail(f"peers {', '.join(wrong)}: here there are {', '.join(possible[1:])}")
    return Plan(
        ranks=ranks,
        rounds=arguments.rounds,
        peers=tuple(peers),
        options=options(arguments.compile),
        compiler=arguments.compiler,
        limits=_ALONE if style == "alone" else _SPREAD,
    )


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    ranks = start_or_alone(arguments.device)
    style = _style(arguments.parallel, ranks)
    plan = _plan(arguments, ranks, style)
    layers = arguments.layers or (1 if style == "alone" else 2)
    of = ranks.name if style == "alone" else f"{style}-{ranks.name}"
    path: Path = arguments.output or _RESULTS / f"training-{of}.json"
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    where = {
        "device": str(ranks.device), "dtype": "bfloat16" if plan.is_gpu else "float32",
        "ranks": ranks.comm.size, "parallel": style, "layers": layers, "left_out": plan.left_out,
        "eager": plan.eager,
    }  # fmt: skip
    all_rows: list[Row] = []
    llamas = [m.name for m in MODELS if m.family == "llama"]
    models = arguments.model or (llamas if style == "alone" else ["llama3-8b"])
    for case in cases(models, "prefill", arguments.tokens, 0, is_small=arguments.small):
        of_case = list(rows(plan, case, style, layers))
        all_rows += of_case
        if ranks.comm.rank == 0:
            title = f"{case.name}, a training step of {layers} on {of}"
            show(screen.output(), title, of_case)
            Report(benchmark="training", arguments=given, rows=all_rows, where=where).write(path)
        mf.debug.FusionCache.reset()  # plans own buffers and graphs
        gc.collect()
        if plan.is_gpu:
            torch.cuda.empty_cache()
    if ranks.comm.rank == 0:
        for line in plan.lines():
            screen.output().print(line, markup=False, soft_wrap=True)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
