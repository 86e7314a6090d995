"""Host time: mdfuse against loops written by hand, DTensor, and a graph captured by hand.

python benchmarks/host_latency.py                                        # no ranks, nothing is sent
./launch/torchrun 4 benchmarks/host_latency.py --backend gloo
./launch/torchrun 8 benchmarks/host_latency.py                           # NCCL, on GPUs
./launch/torchrun 8 benchmarks/host_latency.py --fast-lane always        # posts through nccl4py
mdfuse bench host_latency --rows instructions,reshard --quick

Prints one table and stores it with every round. docs/measured.md says how to read it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import _chains
import _lowering
import _peak
from _agree import check
from _graphs import HandGraph
from _measure import Contender, Report, Row, device_time, host_time, interleave, show
from _ranks import Ranks, choose_backend, start
from _reshards import reshards
from torch import Tensor

import mdfuse as mf
from mdfuse.cli import screen

_Call = Callable[[], Tensor]

_RESULTS = Path(__file__).parent / "results"

#: At most this many instructions between two waits: a GPU's queue holds about 1,000 entries, and a
#: post may be several.
_QUEUED = 120


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The extent of a measurement.

    Attributes:
        ranks: on which ranks.
        rounds: how many.
        calls: instructions per turn on a CPU.
        is_quick: whether only to see that it runs.
    """

    ranks: Ranks
    rounds: int
    calls: int
    is_quick: bool

    def batch(self, instructions: int) -> int:
        """Calls per turn of something with that many instructions."""
        most = _QUEUED if self.ranks.device.type == "cuda" else self.calls
        return max(1, most // instructions)

    def compare(self, batch: int, **contenders: Contender) -> dict[str, list[float]]:
        return interleave(contenders, rounds=self.rounds, batch=batch, settle=self.ranks.settle)


def instructions(plan: Plan) -> Iterator[Row]:
    """Yield the time that the evaluator adds to its calls."""
    cases = [_chains.communicating(plan.ranks, 8), _chains.local(plan.ranks, 8)]
    if not plan.is_quick:
        cases.insert(1, _chains.communicating(plan.ranks, 32))
    for case in cases:
        program = mf.compile(case.definition, mf.Options(graph="never", overlap="never"))
        ours, hand = _callers(program, case)
        check(case.name, plan.ranks, (ours, hand), case.want)
        times = plan.compare(
            plan.batch(case.instructions), ours=Contender(call=ours), hand=Contender(call=hand)
        )
        row = Row(
            name=case.name,
            sizes=case.sizes,
            unit="us",
            ours=times["ours"],
            against=times["hand"],
            alternative="by hand",
            limit=1.10,
        )
        yield row
        if plan.ranks.comm.backend != "gloo":  # its transfers vary by more than that
            added, per = "  added per instruction", case.instructions
            yield replace(row, name=added, sizes="", kind="added", per=per, limit=1.0)


def reshard(plan: Plan) -> Iterator[Row]:
    """A plan of one reshard against DTensor.redistribute."""
    for case in reshards(plan.ranks):
        theirs = case.theirs
        # counts differ: for all-to-all on CPUs, DTensor gathers and cuts
        contenders = (case.ours, partial(_local, theirs))
        check(case.name, plan.ranks, contenders, case.want, counts=False)
        times = plan.compare(
            plan.batch(4), ours=Contender(call=case.ours), theirs=Contender(call=theirs)
        )
        yield Row(
            name=case.name,
            sizes=case.sizes,
            unit="us",
            ours=times["ours"],
            against=times["theirs"],
            alternative="DTensor",
            limit=0.3 if plan.ranks.comm.backend != "gloo" else None,
        )


def graph(plan: Plan) -> Iterator[Row]:
    """A replayed program against the same captured by hand: host time, then GPU time."""
    case = _chains.communicating(plan.ranks, 8)
    program = mf.compile(case.definition, mf.Options(graph="always", overlap="never"))
    captured = HandGraph(case.hand, case.inputs)
    ours, _ = _callers(program, case)
    hand = partial(captured, *case.inputs)
    check(f"replayed, {case.name}", plan.ranks, (ours, hand), case.want, counts=False)
    contenders = {"ours": Contender(call=ours), "hand": Contender(call=hand)}
    for what, stopwatch in (("host", host_time), ("GPU", device_time)):
        times = interleave(
            contenders,
            rounds=plan.rounds,
            batch=plan.batch(8),
            settle=plan.ranks.settle,
            stopwatch=stopwatch,
        )
        yield Row(
            name=f"replayed, {what} time: {case.name}",
            sizes=case.sizes,
            unit="us",
            ours=times["ours"],
            against=times["hand"],
            alternative="captured by hand",
            limit=1.05,
        )


def lowering(plan: Plan) -> Iterator[Row]:
    """Lowering and verification on 8,192 ranks against 8."""
    for name, define, small, large in _lowering.PROGRAMS:
        times = plan.compare(
            1,
            large=_lowering.lowering(define, large),
            small=_lowering.lowering(define, small),
        )
        yield Row(
            name=f"lower and verify: {name}",
            sizes=_mesh(large),
            unit="ms",
            ours=times["large"],
            against=times["small"],
            alternative=_mesh(small),
            limit=1.5,
        )


def memory(plan: Plan) -> Iterator[Row]:
    """Bytes at the peak of a run against inputs + outputs + intermediates alive at once."""
    rows = 128 if plan.is_quick else 1024
    for footprint in (_peak.mlp_chain(plan.ranks, rows), _peak.posting_chain(plan.ranks, rows)):
        ours, by_hand = _peak.peak_bytes(plan.ranks, footprint)
        yield Row(
            name=footprint.name,
            sizes=footprint.sizes,
            unit="MiB",
            ours=[ours],
            against=[by_hand],
            alternative="summed by hand",
            limit=1.05,
        )


def _mesh(axes: dict[str, int]) -> str:
    return f"mesh {', '.join(f'{axis}={size}' for axis, size in axes.items())}"


def _local(redistribute: Callable[[], Any]) -> Tensor:
    """This rank's part of a DTensor."""
    part: Tensor = redistribute().to_local()
    return part


def _callers(program: mf.Program, case: _chains.Case) -> tuple[_Call, _Call]:
    """The program and the loop by hand on a case's inputs."""
    run, hand, inputs = program.run, case.hand, case.inputs
    return lambda: run(*inputs)[0], lambda: hand(*inputs)


#: In the order of the table of figures.
ROWS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "instructions": instructions,
    "reshard": reshard,
    "graph": graph,
    "lowering": lowering,
    "memory": memory,
}


#: backend -> what it can say something about. Gloo's transfers take longer than any host time, and
#: it allocates inside of a post; a graph needs GPUs, and other ranks that are there.
_POSSIBLE: dict[str, Sequence[str]] = {
    "null": ("instructions", "reshard", "lowering", "memory"),
    "gloo": ("instructions", "reshard"),
    "nccl": tuple(ROWS),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("null", "gloo", "nccl"), default=choose_backend())
    parser.add_argument("--ranks", type=int, default=8, help="of the world (backend null)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of buffers (backend null)")
    parser.add_argument(
        "--fast-lane",
        choices=("auto", "never", "always"),
        default="never",
        help="posts through nccl4py (backend nccl); the loops by hand post through torch",
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--rows", help=f"some of {','.join(ROWS)}; by default all that apply")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    return parser.parse_args()


def _chosen(wanted: str | None, ranks: Ranks) -> Sequence[str]:
    """The rows to measure."""
    possible = _POSSIBLE[ranks.comm.backend]
    chosen = possible if wanted is None else wanted.split(",")
    wrong = [name for name in chosen if name not in possible]
    if wrong:
        screen.fail(f"rows {', '.join(wrong)}: on {ranks.name} there are {', '.join(possible)}")
    return chosen


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    ranks = start(arguments.backend, arguments.ranks, arguments.device, arguments.fast_lane)
    plan = Plan(
        ranks=ranks,
        rounds=3 if arguments.quick else arguments.rounds,
        calls=50 if arguments.quick else 240,
        is_quick=arguments.quick,
    )
    chosen = _chosen(arguments.rows, ranks)
    rows = [row for name in chosen for row in ROWS[name](plan)]
    if ranks.comm.rank == 0:
        path = arguments.output or _RESULTS / f"host_latency-{ranks.name}.json"
        where = {
            "backend": ranks.comm.backend,
            "ranks": ranks.comm.size,
            "device": str(ranks.device),
            "fast_lane": ranks.comm.has_fast_lane,
        }
        chosen_by = {k: v for k, v in vars(arguments).items() if k != "output"}
        given = {name: value and str(value) for name, value in chosen_by.items()}
        show(screen.output(), f"host latency on {ranks.name}", rows)
        Report(benchmark="host_latency", arguments=given, rows=rows, where=where).write(path)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
