"""Pipelines beside their tables, and beside torch's.

./launch/torchrun 4 benchmarks/pipelines.py naps                      # stages that sleep
./launch/torchrun 2 benchmarks/pipelines.py layers                    # GPUs, a stage on each
./launch/torchrun 2 benchmarks/pipelines.py layers --device cpu --small --compiler aot_eager

`naps`: the forward, and each half of the backward, of a stage is a nap on one of several gloo
ranks, so two cores are enough; the time of a step is against what the schedule's table says.
`layers`: a stage is some Llama layers. The time of a step is against torch.distributed.pipelining
with the same stages, and the bubble (what a step takes beyond the work of a stage) against the
formula's share of that work. All results are compared with one device in float64 first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _pipelines_layers as layers
import _pipelines_naps as naps
import torch
from _layers_models import cases
from _layers_peers import options
from _measure import Report, show
from _ranks import start

import mdfuse as mf
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("naps", "layers"))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--nap", type=float, default=5.0, help="how long one is, in milliseconds")
    parser.add_argument("--model", default="llama3-8b", help="a Llama of benchmarks/layers.py")
    parser.add_argument("--layers", type=int, default=2, help="on each stage")
    parser.add_argument("--tokens", type=int, help="of a microbatch, one sequence")
    parser.add_argument("--compile", choices=("auto", "never", "always"), help="mdfuse's option")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="short naps, small layers")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    backend = "nccl" if on_gpu and arguments.what == "layers" else "gloo"
    ranks = start(backend, 0, arguments.device)
    if ranks.comm.size < 2:
        screen.fail("one rank is no pipeline: ./launch/torchrun 4 benchmarks/pipelines.py naps")
    path: Path = arguments.output or _RESULTS / f"pipelines-{arguments.what}-{ranks.name}.json"
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    where = {"ranks": ranks.comm.size, "device": str(ranks.device)}
    m, rounds = arguments.microbatches, arguments.rounds
    if arguments.what == "naps":
        seconds = (1.0 if arguments.small else arguments.nap) / 1e3
        found = list(naps.rows(ranks, seconds, m, rounds))
    else:
        found = []
        for case in cases([arguments.model], "prefill", arguments.tokens, 0, arguments.small):
            bench = layers.bench(ranks, case, arguments.layers, m)
            how = options(arguments.compile) or mf.Options()
            found += layers.Layers(
                bench=bench, options=how, compiler=arguments.compiler, rounds=rounds
            ).rows()
    if ranks.comm.rank == 0:
        show(screen.output(), f"pipelines on {ranks.name}", found)
        Report(benchmark="pipelines", arguments=given, rows=found, where=where).write(path)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
