"""Products beside the communication that they wait for, or that waits for them.

python benchmarks/overlap.py                            # one GPU, which stands for a rank of two
python benchmarks/overlap.py --device cpu --small       # only to see that it runs

On one GPU the other ranks are stood in for by copies from pinned memory of the host that take as
long as theirs would over a link (--link); figures are against the longer one of product and copies.
docs/measured.md says more.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from _measure import Report, Row, show
from _overlap_alone import Alone
from _overlap_shapes import SHAPES, SMALL

import mdfuse as mf
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, nargs="+", help="some of them, counted from 0")
    parser.add_argument("--of", type=int, default=2, help="ranks that one GPU is one of")
    parser.add_argument(
        "--link", type=float, default=180.0, help="GB/s that it stands in for: NCCL's"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="products of some thousand numbers")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() if arguments.device is None else arguments.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    alone = Alone(device, arguments.of, arguments.rounds, arguments.link * 1e9)
    path: Path = arguments.output or _RESULTS / f"overlap-alone-{device.type}.json"
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    shapes = SMALL if arguments.small else SHAPES
    found: list[Row] = []
    for shape in [shapes[n] for n in arguments.shapes or range(len(shapes))]:
        of_shape = list(alone.rows(shape))
        found += of_shape
        show(screen.output(), f"{shape}, rank 0 of {alone.size}", of_shape)
        report = Report(benchmark="overlap", arguments=given, rows=found, where=alone.where)
        report.write(path)
        mf.FusionCache.reset()  # plans own buffers and graphs
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    screen.output().print(f"written: {path}", soft_wrap=True)
    alone.comm.close()


if __name__ == "__main__":
    main()
