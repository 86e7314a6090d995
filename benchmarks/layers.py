"""Whole transformer layers, forward: mdfuse against torch by hand, torch.compile and DTensor.

python benchmarks/layers.py                                            # one GPU, or one process
python benchmarks/layers.py --model llama3-8b --phase decode           # some rows
./launch/torchrun 2 benchmarks/layers.py                               # heads and units split
./launch/torchrun 2 benchmarks/layers.py --sequence --backend symmetric --overlap auto
python benchmarks/layers.py --device cpu --small --compiler aot_eager  # only to see that it runs
python benchmarks/layers.py --plot FILE.json ...                       # draws what was stored

Contenders: eager (one function of torch's, all-reduces by torch.distributed), compiled (the same
under torch.compile, functional all-reduces), dtensor (parallelize_module), dtensor-compiled; and
where the name ends in graph, captured by hand as a CUDA graph. With --sequence tokens are split
outside of linear layers; then reduced-graph has all-reduces all the same, and alone-graph computes
a rank's part without any communication. docs/measured.md says more.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from _layers_figures import Plan, rows
from _layers_models import MODELS, Case, cases
from _layers_peers import PEERS, options
from _layers_plot import draw
from _measure import Report, Row, show
from _ranks import start_or_alone

import mdfuse as mf
from mdfuse.cli import screen

#: Contenders that nobody has to name; the others are for tokens that are split.
_USUAL = [name for name in PEERS if name not in ("mdfuse", "reduced-graph", "alone-graph")]

_RESULTS = Path(__file__).parent / "results"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[m.name for m in MODELS], nargs="+", help="some of them")
    parser.add_argument("--phase", choices=("prefill", "decode"), help="one of them")
    parser.add_argument("--tokens", type=int, help="of a prefill; sequences of a decode")
    parser.add_argument("--cache", type=int, help="earlier positions of a decode")
    parser.add_argument("--peers", help=f"some of {','.join([*PEERS][1:])}; by default all")
    parser.add_argument("--compile", choices=("auto", "never", "always"), help="mdfuse's option")
    parser.add_argument("--sequence", action="store_true", help="tokens are split, too")
    parser.add_argument("--overlap", choices=("never", "auto", "measure"), help="mdfuse's option")
    parser.add_argument("--costs", help="mdfuse's table for it")
    parser.add_argument("--backend", help="mdfuse's on several ranks: nccl (gloo), or symmetric")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--small", action="store_true", help="layers of some thousand weights")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    parser.add_argument("--plot", type=Path, nargs="+", help="results to draw; nothing is measured")
    return parser.parse_args()


def _chosen(arguments: argparse.Namespace, size: int) -> list[Case]:
    """The layers to measure, those left out that cannot be split over the ranks."""
    cache = arguments.cache or (40 if arguments.small else 2048)
    wanted = cases(
        arguments.model, arguments.phase, arguments.tokens, cache, is_small=arguments.small
    )
    chosen = []
    for case in wanted:
        if arguments.sequence and case.phase == "decode":
            continue
        if case.model.kv_heads % size or case.model.hidden % size:
            heads = f"{case.model.kv_heads} heads, {case.model.hidden} hidden units"
            screen.output().print(f"left out: {case.name}: {heads} on {size} ranks")
        else:
            chosen.append(case)
    if not chosen:
        screen.fail("no layer is left to measure: minilm has no decode, and heads must be split")
    return chosen


def _peers(wanted: str | None, is_gpu: bool) -> tuple[str, ...]:
    """The contenders to run; without a GPU no graphs."""
    possible = [name for name, peer in PEERS.items() if is_gpu or not peer.is_captured]
    chosen = _USUAL if wanted is None else wanted.split(",")
    chosen = [name for name in chosen if name in possible] if wanted is None else chosen
    wrong = [name for name in chosen if name not in possible[1:]]
    if wrong:
        screen.fail(f"peers {', '.join(wrong)}: here there are {', '.join(possible[1:])}")
    return ("mdfuse", *chosen)


def _where(plan: Plan) -> dict[str, object]:
    return {
        "ranks": plan.ranks.comm.size,
        "backend": plan.ranks.comm.backend,
        "device": str(plan.ranks.device),
        "tokens": "split" if plan.is_sequence else "everywhere",
        "dtype": "bfloat16" if plan.is_gpu else "float32",
        "reference": "float64",
        "peers": plan.peers,
        "left_out": plan.left_out,
        "eager": plan.eager,
    }


def _measure(plan: Plan, chosen: Sequence[Case], arguments: argparse.Namespace) -> Path:
    """All figures; each layer is shown and stored as soon as it is there."""
    path: Path = arguments.output or _RESULTS / f"layers-{plan.ranks.name}.json"
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    all_rows: list[Row] = []
    for case in chosen:
        of_case = list(rows(plan, case))
        all_rows += of_case
        if plan.ranks.comm.rank == 0:
            show(screen.output(), f"{case.name}, on {plan.ranks.name}", of_case)
            report = Report(benchmark="layers", arguments=given, rows=all_rows, where=_where(plan))
            report.write(path)
        mf.debug.FusionCache.reset()  # plans own buffers and graphs
        gc.collect()
        if plan.is_gpu:
            torch.cuda.empty_cache()
    return path


def main() -> None:
    """Measure, print, store, draw."""
    arguments = _arguments()
    if arguments.plot:
        draw(arguments.plot, arguments.output or arguments.plot[0].with_suffix(".svg"))
        return
    ranks = start_or_alone(arguments.device, arguments.backend)
    mdfuse_options = options(
        arguments.compile,
        overlap=arguments.overlap,
        costs=arguments.costs,
        backend=arguments.backend,
    )
    plan = Plan(
        ranks=ranks,
        rounds=arguments.rounds,
        peers=_peers(arguments.peers, ranks.device.type == "cuda"),
        options=mdfuse_options,
        compiler=arguments.compiler,
        is_sequence=arguments.sequence,
    )
    path = _measure(plan, _chosen(arguments, ranks.comm.size), arguments)
    if ranks.comm.rank == 0:
        for line in plan.lines():
            screen.output().print(line, markup=False, soft_wrap=True)
        screen.output().print(f"written: {path}", soft_wrap=True)
        draw([path], path.with_suffix(".svg"))
    ranks.close()


if __name__ == "__main__":
    main()
