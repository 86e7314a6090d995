"""The cost of seeing: traced runs beside untraced ones, ranges, and how soon a timeline is there.

python benchmarks/tracing.py
python benchmarks/tracing.py --quick                # only to see that it runs

One process and one thread, whose processor time is measured, so that other work on the machine does
not count; communications go to the null backend. docs/measured.md says more.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _layers_models import MODELS, Case
from _measure import Contender, Report, Row, interleave, processor_time, show

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard
from mdfuse.cli import screen
from mdfuse.seeing import H100
from mdfuse.seeing.report.page import Subject, html, values_of

_RESULTS = Path(__file__).parent / "results"

#: Microseconds that an instruction of a traced run may take more.
_LIMIT_US = 2.0

#: Seconds that a timeline of a large step, and a report, may take.
_TIMELINE_S, _REPORT_S = 30.0, 2.0

#: The mesh of the large step, as axes.
_LARGE = {"dp": 128, "tp": 8}


def _chain(length: int) -> mf.FusionDefinition:
    """Small pointwise work, one after the other."""
    with mf.FusionDefinition("chain") as fd:
        x: Any = fd.define_tensor([4], mesh=DeviceMesh([0]))
        for _ in range(length):
            x = -x
        fd.add_output(x)
    return fd


def _posting(length: int) -> mf.FusionDefinition:
    """All-gathers with work between them."""
    mesh = DeviceMesh.arange(tp=8)
    with mf.FusionDefinition("posting") as fd:
        x: Any = fd.define_tensor([8], mesh=mesh, layout={"tp": Shard(0)})
        for _ in range(length):
            y = fd.ops.set(-x).on(mesh, {})
            x = fd.ops.set(-y).on(mesh, {"tp": Shard(0)})
        fd.add_output(x)
    return fd


def runs(rounds: int, is_quick: bool, folder: str) -> Iterator[Row]:
    """Yield the time that stamps and ranges add to an instruction."""
    length = 20 if is_quick else 500
    for fd in (_chain(length), _posting(length // 5)):
        contenders, count = {}, 0
        for name, options in (
            ("plain", mf.Options()),
            ("traced", mf.Options(trace=folder)),
            ("ranges", mf.Options(ranges="torch")),
        ):
            program = mf.compile(fd, replace(options, compile="never"))
            inputs = [torch.zeros(4 if fd.fusion.name == "chain" else 1)]
            contenders[name] = Contender(call=_call(program, inputs))
            count = len([i for i in program.for_rank(0).instructions if i.op not in _FREE])
        times = interleave(
            contenders, rounds=rounds, batch=1, settle=lambda: None, stopwatch=processor_time
        )
        for name, limit in (("traced", _LIMIT_US), ("ranges", None)):
            yield Row(
                name=f"{fd.fusion.name}, {name}: added per instruction",
                sizes=f"{count} instructions",
                unit="us",
                ours=times[name],
                against=times["plain"],
                alternative="not noted",
                limit=limit,
                kind="added",
                per=count,
            )


#: Instructions that call nothing.
_FREE = ("return", "free", "alloc")


def _call(program: mf.Program, inputs: list[Any]) -> Any:
    return lambda: program.run(*inputs)


def _step(layers: int) -> mf.Program:
    """A step of training: forward, backward, and a new value of each weight."""
    mesh = DeviceMesh.arange(**_LARGE)
    model = next(m for m in MODELS if m.name == "llama-1b")
    case = Case(model=model, phase="prefill", tokens=512, cache=0)
    shapes = {name: shape for name, shape in case.shapes().items() if name != "x"}
    with mf.FusionDefinition("step") as fd:
        batch = Layout(mesh, {"dp": Shard(0)})
        x: Any = fd.define_tensor([mesh.shape[0], 512, model.width], layout=batch)
        weights = []
        for _ in range(layers):
            w: dict[str, Any] = {
                name: fd.define_tensor(
                    shape, mesh=mesh, layout={} if d is None else {"tp": Shard(d)}
                )
                for name, (shape, d) in shapes.items()
            }
            weights += [w[name] for name in case.linears()]
            x = case.layer(w | {"x": x}, lambda name, y, w=w: F.linear(y, w[name]))
        grads = mf.grad(fd.ops.mean(x * x), weights)
        for weight, grad in zip(weights, grads, strict=True):
            fd.add_output(weight - grad * 1e-3, reuse=weight)
    return mf.compile(fd)


def pictures(rounds: int, is_quick: bool) -> Iterator[Row]:
    """Yield the times of a timeline of a large step, and of a report of MiniLM's layers."""
    program = _step(1 if is_quick else 80)
    minilm = _minilm(1 if is_quick else 6)

    def report() -> int:
        fd, encoder = minilm
        subject = Subject(
            host=encoder.host,
            definition=str(fd),
            segments=[str(s.fusion) for s in encoder.segments],
            explained=encoder.explain(),
            values=values_of(encoder.fusion),
            costs=H100,
        )
        return len(html(subject).encode())

    ranks = 1
    for size in _LARGE.values():
        ranks *= size
    reports = {
        f"timeline of a step of {1 if is_quick else 80} layers": (
            lambda: program.timeline(H100), f"{len(program.host)} instructions, {ranks} ranks",
            _TIMELINE_S,
        ),
        "report of all-MiniLM-L6-v2": (report, f"4 ranks, {report() / 1024:.0f} KiB", _REPORT_S),
    }  # fmt: skip
    for name, (call, sizes, limit_s) in reports.items():
        times = interleave(
            {"ours": Contender(call=call)},
            rounds=rounds,
            batch=1,
            settle=lambda: None,
            stopwatch=processor_time,
        )
        yield Row(
            name=name,
            sizes=sizes,
            unit="ms",
            ours=times["ours"],
            against=[limit_s * 1e9] * rounds,
            alternative=f"{limit_s:g} s",
            limit=1.0,
        )


def _minilm(layers: int) -> tuple[mf.FusionDefinition, mf.Program]:
    mesh = DeviceMesh.arange(tp=4)
    model = next(m for m in MODELS if m.name == "minilm")
    case = Case(model=model, phase="prefill", tokens=128, cache=0)
    layouts = case.layouts(mesh)
    with mf.FusionDefinition("minilm") as fd:
        shapes = {name: shape for name, (shape, _) in case.shapes().items()}
        x: Any = fd.define_tensor(shapes.pop("x"), mesh=mesh)
        for _ in range(layers):
            w: dict[str, Any] = {
                name: fd.define_tensor(shape, layout=layouts[name])
                for name, shape in shapes.items()
            }
            x = case.layer(
                w | {"x": x}, lambda name, y, w=w: F.linear(y, w[name], w[f"{name}_bias"])
            )
        fd.add_output(x)
    return fd, mf.compile(fd)


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=301)
    parser.add_argument("--output", type=Path, default=_RESULTS / "tracing.json")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    comm = mf.init(backend="null", rank=0, size=8)
    rounds = 3 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as folder:
        all_rows = [*runs(rounds, arguments.quick, folder)]
        comm.close()
    all_rows += pictures(1 if arguments.quick else 5, arguments.quick)
    show(screen.output(), "what seeing costs", all_rows)
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    where = {"backend": "null", "ranks": 8, "device": "cpu"}
    Report(benchmark="tracing", arguments=given, rows=all_rows, where=where).write(arguments.output)
    screen.output().print(f"written: {arguments.output}", soft_wrap=True)


if __name__ == "__main__":
    main()
