"""Pipelines beside their tables, and beside torch's.

./launch/torchrun 4 benchmarks/pipelines.py naps                      # stages that sleep
./launch/torchrun 4 benchmarks/pipelines.py naps --nap 5,20 --rounds 3
./launch/torchrun 2 benchmarks/pipelines.py layers                    # GPUs, a stage on each
./launch/torchrun 2 benchmarks/pipelines.py layers --schedules gpipe,1f1b,zb1p --layers 2
./launch/torchrun 2 benchmarks/pipelines.py layers --schedules interleaved --backend symmetric
./launch/torchrun 2 benchmarks/pipelines.py layers --device cpu --small --compiler aot_eager

`naps`: the forward, and each half of the backward, of a stage is a nap on one of several gloo
ranks, so two cores are enough; the time of a step is against what the schedule's table says, for
naps as long as they are here and as they were told to be, and against the same table by hand.
`layers`: a stage is some Llama layers. The time of a step is against torch.distributed.pipelining
with the same stages, and the bubble (what a step takes beyond the work of a stage) against the
formula's share of that work, and, where there is a table of costs, against what it predicts. The
formula knows of no hand-overs. With `1f1b` a stage has no more forwards than it needs to be busy
without them: each microbatch waits for one there and one back. `interleaved` with a stage on each
rank begins as many forwards again, which hides them. All results are compared with one device in
float64 first.

A line says what each step took to compile. A row of layers is printed, and the file written anew,
as soon as it is measured. `--compiler none` leaves torch.compile out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import _pipelines_layers as layers
import _pipelines_naps as naps
import torch
from _layers_models import cases
from _layers_peers import options
from _measure import Report, Row, show
from _pipelines_torch import SCHEDULES
from _ranks import Ranks, start

import mdfuse as mf
from mdfuse.cli import screen
from mdfuse.seeing import Costs
from mdfuse.seeing.named_tables import HERE, named, table_here

_RESULTS = Path(__file__).parent / "results"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("naps", "layers"))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--nap", default="5", help="how long one is, in milliseconds: some, as 5,20"
    )
    parser.add_argument("--model", default="llama3-8b", help="a Llama of benchmarks/layers.py")
    parser.add_argument("--layers", type=int, default=1, help="on each stage")
    parser.add_argument(
        "--schedules", default="1f1b", help=f"of layers, some of {','.join(SCHEDULES)}"
    )
    parser.add_argument("--costs", default="here", help="mdfuse's table, for the predicted bubble")
    parser.add_argument("--backend", help="mdfuse's, of layers: nccl (gloo), or symmetric")
    parser.add_argument("--tokens", type=int, help="of a microbatch, one sequence")
    parser.add_argument("--compile", choices=("auto", "never", "always"), help="mdfuse's option")
    parser.add_argument(
        "--compiler", default="inductor", help="the backend of torch.compile; none: without it"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="short naps, small layers")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    arguments = parser.parse_args()
    unknown = {*arguments.schedules.split(",")} - {*SCHEDULES}
    if unknown:
        parser.error(f"--schedules: {', '.join(unknown)}; there are {', '.join(SCHEDULES)}")
    return arguments


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    backend = "nccl" if on_gpu and arguments.what == "layers" else "gloo"
    ranks = start(backend, 0, arguments.device, carrier=arguments.backend)
    if ranks.comm.size < 2:
        screen.fail("one rank is no pipeline: ./launch/torchrun 4 benchmarks/pipelines.py naps")
    path: Path = arguments.output or _RESULTS / f"pipelines-{arguments.what}-{ranks.name}.json"
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    where = {"ranks": ranks.comm.size, "device": str(ranks.device)}
    all_rows: list[Row] = []
    for row in _rows(arguments, ranks):
        all_rows.append(row)
        if ranks.comm.rank == 0:
            if arguments.what == "layers":
                show(screen.output(), f"pipelines on {ranks.name}", [row])
            Report(benchmark="pipelines", arguments=given, rows=all_rows, where=where).write(path)
    if ranks.comm.rank == 0:
        show(screen.output(), f"pipelines on {ranks.name}", all_rows)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


def _rows(arguments: argparse.Namespace, ranks: Ranks) -> Iterator[Row]:
    """The rows of either half, each as soon as it is measured."""
    m, rounds = arguments.microbatches, arguments.rounds
    if arguments.what == "naps":
        nap = "1" if arguments.small else arguments.nap
        yield from naps.rows(ranks, [float(x) / 1e3 for x in nap.split(",")], m, rounds)
        return

    def note(line: str) -> None:
        if ranks.comm.rank == 0:
            screen.output().print(line, soft_wrap=True)

    compiler = None if arguments.compiler == "none" else arguments.compiler
    for case in cases([arguments.model], "prefill", arguments.tokens, 0, arguments.small):
        yield from layers.Layers(
            bench=layers.bench(ranks, case, arguments.layers, m),
            options=options(arguments.compile, backend=arguments.backend) or mf.Options(),
            compiler=compiler,
            rounds=rounds,
            costs=_costs(arguments, note),
            note=note,
        ).rows(arguments.schedules.split(","))


def _costs(arguments: argparse.Namespace, note: Callable[[str], None]) -> Costs | None:
    """The table that is named; None where this machine has none."""
    backend = arguments.backend or "auto"
    if arguments.costs != HERE:
        return named(arguments.costs, backend)[0]
    table, words = table_here(backend)
    for line in words:
        note(f"costs: {line}")
    return table.costs if table is not None else None


if __name__ == "__main__":
    main()
