"""Predicted times beside measured ones, of programs that the calibration did not see.

python benchmarks/costs.py                                # one GPU, or one process
OMP_NUM_THREADS=1 ./launch/torchrun 2 benchmarks/costs.py # two ranks of one thread each, gloo
python benchmarks/costs.py --costs table.json             # a table that `mdfuse calibrate` wrote
python benchmarks/costs.py --kinds                        # and by kinds of instruction, by traces
python benchmarks/costs.py --small --rounds 2             # only to see that it runs

The figure is the predicted time over the measured one; docs/measured.md says more.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _layers_models import Case, cases
from _measure import (
    Contender,
    Report,
    Row,
    device_time,
    eagerly,
    host_time,
    interleave,
    show,
)
from _ranks import Ranks, start_or_alone
from rich.table import Table

import mdfuse as mf
from mdfuse.cli import screen
from mdfuse.cli.calibration.command import calibrated
from mdfuse.cli.rich_tables import time_text, titled
from mdfuse.seeing.cost_tables import CostTable, find_table, machine_of, parsed
from mdfuse.seeing.traces import last_run

_RESULTS = Path(__file__).parent / "results"

#: Clock cycles for which a GPU is kept busy while the host queues runs.
_AHEAD = 8_000_000

#: Runs of a turn, behind each other, as those are that a calibration is judged by.
_ROW = 8

#: Traced runs, of which the last one counts.
_TRACED = 5

#: model, phase, layers, tokens on a CPU and on a GPU.
_PROGRAMS = (
    ("minilm", "prefill", 6, 128, 512),
    ("minilm", "prefill", 6, 32, 128),
    ("llama-1b", "prefill", 1, 128, 512),
    ("llama-1b", "prefill", 1, 32, 2048),
    ("llama-1b", "decode", 1, 4, 16),
    ("llama3-8b", "prefill", 1, 32, 2048),
    ("llama3-8b", "decode", 1, 4, 16),
)


def _cases(is_gpu: bool, is_small: bool, models: list[str] | None) -> Iterator[tuple[Case, int]]:
    """Yield the predicted and measured cases: a layer, and the number of layers."""
    for model, phase, layers, on_cpu, on_gpu in _PROGRAMS:
        if models is not None and model not in models:
            continue
        tokens = None if is_small else on_gpu if is_gpu else on_cpu
        chosen = cases([model], phase, tokens, 2048 if is_gpu else 256, is_small=is_small)  # type: ignore[arg-type]
        yield from ((case, layers) for case in chosen)


def _program(
    case: Case,
    layers: int,
    ranks: Ranks,
    dtype: torch.dtype,
    options: mf.Options | None = None,
) -> mf.Program:
    """Layers of equal sizes behind each other, each with its own weights."""
    layouts = case.layouts(ranks.mesh)
    with mf.FusionDefinition(case.model.name.replace("-", "_")) as fd:
        shapes = {name: shape for name, (shape, _) in case.shapes().items()}
        x: Any = fd.define_tensor(shapes.pop("x"), dtype, ranks.mesh, layouts["x"])
        for _ in range(layers):
            w: dict[str, Any] = {
                name: fd.define_tensor(shape, dtype, ranks.mesh, layouts[name])
                for name, shape in shapes.items()
            }
            x = case.layer(w | {"x": x}, partial(_dense, w))
        fd.add_output(x)
    return mf.compile(fd, options)


def _dense(w: dict[str, Any], name: str, x: Any) -> Any:
    return F.linear(x, w[name], w.get(f"{name}_bias"))


def _inputs(program: mf.Program, ranks: Ranks) -> list[Any]:
    kinds = [program.host.types[name] for name in program.host.inputs]
    shapes = [kind.local_shape(ranks.comm.rank) for kind in kinds]
    return [
        torch.randn(shape, dtype=kind.dtype, device=ranks.device) / 8
        for kind, shape in zip(kinds, shapes, strict=True)
    ]


def rows(
    ranks: Ranks, table: CostTable, arguments: argparse.Namespace, eager: list[str]
) -> Iterator[Row]:
    """A row for each program; they are measured in turns. What ran eagerly is added to `eager`."""
    is_gpu = ranks.device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    contenders: dict[str, Contender] = {}
    predicted: dict[str, tuple[float, str]] = {}
    programs: dict[str, mf.Program] = {}
    for case, layers in _cases(is_gpu, arguments.small, arguments.model):
        program = _program(case, layers, ranks, dtype)
        name = f"{case.name}, {case.sizes}"
        programs[name] = program
        seconds = program.timeline(table.costs).seconds
        predicted[name] = seconds * 1e9, f"{layers} layers" if layers > 1 else "1 layer"
        contenders[name] = Contender(call=_call(program, _inputs(program, ranks)))
    times = interleave(
        contenders,
        rounds=arguments.rounds,
        batch=_ROW,
        settle=ranks.settle,
        stopwatch=partial(device_time, ahead=_AHEAD) if is_gpu else host_time,
    )
    eager += [f"{name}: {line}" for name, p in programs.items() for line in eagerly(p)]
    for name, (ns, layers) in predicted.items():
        yield Row(
            name=name,
            sizes=layers,
            unit="us",
            ours=[ns] * len(times[name]),
            against=times[name],
            alternative="measured",
            limit=None,
        )


def kinds(
    ranks: Ranks, table: CostTable, arguments: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """Yield each program, and kind of instruction -> predicted and measured seconds, by a trace."""
    is_gpu = ranks.device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    for n, (case, layers) in enumerate(_cases(is_gpu, arguments.small, arguments.model)):
        place = folder / str(n)
        program = _program(case, layers, ranks, dtype, mf.Options(trace=str(place)))
        call = _call(program, _inputs(program, ranks))
        for _ in range(_TRACED):
            call()
        ranks.settle()
        seconds = defaultdict[str, list[float]](lambda: [0.0, 0.0])
        if ranks.comm.rank == 0:
            both = program.timeline(table.costs).events, last_run(place, program.host.name)
            for side, events in enumerate(both):
                for e in (e for e in events if e.rank == 0 and e.part != "transfer"):
                    kind = e.name.rpartition(" = ")[2].partition(" ")[0]
                    seconds[kind][side] += (e.stop_ns - e.start_ns) / 1e9
        ranks.settle()
        yield f"{case.name}, {case.sizes}", {k: (a, b) for k, (a, b) in seconds.items()}


def shown_kinds(name: str, kinds: dict[str, tuple[float, float]]) -> Table:
    """Return a table of the kinds that took longest."""
    table = titled(f"{name}: rank 0 by kinds", "kind", right=("predicted", "measured", "ratio"))
    for kind, (a, b) in sorted(kinds.items(), key=lambda x: -x[1][1])[:10]:
        table.add_row(kind, time_text(a), time_text(b), f"{a / b:.2f}" if b else "")
    return table


def _call(program: mf.Program, inputs: list[Any]) -> Callable[[], object]:
    run = program.run
    return lambda: run(*inputs)


def table_of(ranks: Ranks, file: Path | None) -> CostTable:
    """The table of a file, else that of this machine, else one that is measured now."""
    if file is not None:
        return parsed(file.read_text(encoding="utf-8"))
    machine = machine_of(ranks.device, ranks.comm.backend)
    table, words = find_table(machine)
    for line in words:
        screen.output().print(line)
    is_right = table is not None and table.ranks == ranks.comm.size
    if any(ranks.comm.all_ok(None if is_right else "no table")):
        table = calibrated(ranks.comm)
    assert table is not None
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--costs", type=Path, help="a table; by default that of this machine")
    models = sorted({model for model, *_ in _PROGRAMS})
    parser.add_argument("--model", choices=models, nargs="+", help="some of them")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--small", action="store_true", help="layers of some thousand weights")
    parser.add_argument("--kinds", action="store_true", help="each kind of instruction, too")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Predict, measure, print, store."""
    arguments = _arguments()
    ranks = start_or_alone(arguments.device)
    table = table_of(ranks, arguments.costs)
    eager: list[str] = []
    all_rows = list(rows(ranks, table, arguments, eager))
    by_kind = dict[str, dict[str, tuple[float, float]]]()
    if arguments.kinds:
        with tempfile.TemporaryDirectory() as mine:
            folders = ranks.comm.all_ok(mine)  # ranks of one host write into one folder
            by_kind = dict(kinds(ranks, table, arguments, Path(str(folders[0]))))
            ranks.settle()
    if ranks.comm.rank == 0:
        path = arguments.output or _RESULTS / f"costs-{ranks.name}.json"
        where = {
            "ranks": ranks.comm.size,
            "backend": ranks.comm.backend,
            "device": str(ranks.device),
            "table": table.text,
            "held_out": dict(table.held_out),
            "spread": table.spread,
            "eager": eager,
            "kinds": by_kind,
        }
        given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
        show(screen.output(), f"predicted and measured, on {ranks.name}", all_rows)
        for name, some in by_kind.items():
            screen.output().print(shown_kinds(name, some))
        for line in eager:
            screen.output().print(f"not compiled or captured: {line}", soft_wrap=True)
        Report(benchmark="costs", arguments=given, rows=all_rows, where=where).write(path)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
