"""Products beside the communication that they wait for, or that waits for them.

python benchmarks/overlap.py                               # one GPU, for a rank of two
./launch/torchrun 2 benchmarks/overlap.py                  # 2, 4 or 8 GPUs, over NCCL
./launch/torchrun 2 benchmarks/overlap.py --backend symmetric
python benchmarks/overlap.py --device cpu --small          # only to see that it runs
python benchmarks/overlap.py --plot FILE.json ...          # draws what was stored

On one GPU the other ranks are stood in for by copies from pinned memory of the host that take as
long as theirs would over a link (--link). Figures are against the longer one of the product and of
what moves; on several GPUs against NCCL and the product in turn, torch.compile and torch's fused
operators, too. docs/measured.md says more.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import torch
from _layers_plot import draw
from _measure import Report, Row, show
from _overlap_alone import Alone
from _overlap_ranks import Together
from _overlap_shapes import SHAPES, SMALL
from _ranks import start_or_alone

import mdfuse as mf
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, nargs="+", help="some of them, counted from 0")
    parser.add_argument("--of", type=int, default=2, help="ranks that one GPU is one of")
    parser.add_argument("--link", type=float, default=180.0, help="GB/s stood in for: NCCL's")
    parser.add_argument("--backend", help="mdfuse's on several ranks: nccl (gloo), or symmetric")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="products of some thousand numbers")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    parser.add_argument("--plot", type=Path, nargs="+", help="results to draw; nothing is measured")
    return parser.parse_args()


def _bench(arguments: argparse.Namespace) -> tuple[Alone | Together, str]:
    """The measurement, and what its file is called after."""
    if "RANK" in os.environ:
        ranks = start_or_alone(arguments.device, arguments.backend)
        return Together(ranks, arguments.rounds, arguments.compiler), ranks.name
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() if arguments.device is None else arguments.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    bench = Alone(device, arguments.of, arguments.rounds, arguments.link * 1e9)
    return bench, f"alone-{device.type}"


def main() -> None:
    """Measure, print, store, draw."""
    arguments = _arguments()
    if arguments.plot:
        draw(arguments.plot, arguments.output or arguments.plot[0].with_suffix(".svg"))
        return
    bench, name = _bench(arguments)
    path: Path = arguments.output or _RESULTS / f"overlap-{name}.json"
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    shapes = SMALL if arguments.small else SHAPES
    is_first = not isinstance(bench, Together) or bench.ranks.comm.rank == 0
    all_rows: list[Row] = []
    shown = 0
    for shape in [shapes[n] for n in arguments.shapes or range(len(shapes))]:
        of_shape = list(bench.rows(shape))
        all_rows += of_shape
        if is_first:
            show(screen.output(), f"{shape}, {bench.size} ranks", of_shape)
            for line in bench.eager[shown:]:
                screen.output().print(f"not compiled or captured: {line}", soft_wrap=True)
            shown = len(bench.eager)
            report = Report(benchmark="overlap", arguments=given, rows=all_rows, where=bench.where)
            report.write(path)
        mf.debug.FusionCache.reset()  # plans own buffers and graphs
        gc.collect()
        if bench.is_gpu:
            torch.cuda.empty_cache()
    if is_first:
        screen.output().print(f"written: {path}", soft_wrap=True)
        draw([path], path.with_suffix(".svg"))
    bench.close()


if __name__ == "__main__":
    main()
