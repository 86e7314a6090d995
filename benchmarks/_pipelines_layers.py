"""Stages of Llama layers: a step by mdfuse and by torch.distributed.pipelining, and its bubble."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from _layers_models import Case
from _measure import Contender, Row, eagerly, interleave
from _pipelines_clock import makespan_of
from _pipelines_torch import Stage, stage_of, step_of
from _ranks import Ranks
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.hir.rank.pipelines import project
from mdfuse.seeing import Costs
from mdfuse.seeing.memory_use import memory_of

#: The bubble as a multiple of the formula's, the time of torch's, the peak as predicted.
_BUBBLE, _TIME, _PEAK = 1.05, 1.0, 1.05

#: dtype -> the largest error of a result, relative to its norm.
_TOLERANCE = {torch.bfloat16: 6e-2, torch.float32: 1e-4}

#: The loss, and the gradients of this rank's stage by name of the weight.
Results = tuple[Tensor | None, Mapping[str, Tensor]]

C = TypeVar("C", bound=Callable[[], Any])


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A pipeline whose stages have some layers each; this rank's stage and data.

    Attributes:
        ranks: a stage on each.
        case: a layer, and what goes through it for a microbatch.
        layers: how many a stage has.
        microbatches: how many a step has.
        weights: name -> those of this stage, on this device.
        angles: cosines and sines of rotary embedding.
        x: what the first stage gets.
        t: what the loss of the last stage compares with.
    """

    ranks: Ranks
    case: Case
    layers: int
    microbatches: int
    weights: Mapping[str, Tensor]
    angles: Mapping[str, Tensor]
    x: Tensor
    t: Tensor

    @property
    def stages(self) -> int:
        return self.ranks.comm.size

    def stage(self, w: Mapping[str, Any], x: Any) -> Any:
        """Return the result of a stage, from tensors or from values of a fusion."""
        for n in range(self.layers):
            mine = {k: w[f"{k}.{n}"] for k in _names(self.case)}
            mine |= {k: w[k] for k in self.angles}
            x = self.case.layer(
                {**mine, "x": x}, lambda name, y, mine=mine: F.linear(y, mine[name])
            )
        return x


def _names(case: Case) -> list[str]:
    """Return the names of a layer's trained inputs."""
    return [name for name in case.shapes() if name not in ("x", "cos", "sin")]


def _drawn(case: Case, stage: int, layers: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The weights of a stage, the same on every rank."""
    drawn = {}
    for n in range(layers):
        draw = torch.Generator(device).manual_seed(1 + stage * layers + n)
        for name in _names(case):
            shape, _ = case.shapes()[name]
            x = torch.randn(shape, generator=draw, device=device, dtype=torch.float32)
            x = 1 + x / 8 if len(shape) == 1 else x * shape[1] ** -0.5
            drawn[f"{name}.{n}"] = x.to(dtype)
    return drawn


def bench(ranks: Ranks, case: Case, layers: int, microbatches: int) -> Bench:
    """Draw everything."""
    device = ranks.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, t = (
        torch.randn(
            (microbatches, *case.shapes()["x"][0][1:]),
            generator=torch.Generator(device).manual_seed(seed),
            device=device,
            dtype=dtype,
        )
        for seed in (-1, -2)
    )
    drawn = case.draw(device, dtype)
    return Bench(
        ranks=ranks,
        case=case,
        layers=layers,
        microbatches=microbatches,
        weights=_drawn(case, ranks.comm.rank, layers, device, dtype),
        angles={name: drawn[name] for name in ("cos", "sin")},
        x=x,
        t=t,
    )


# -- mdfuse ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Ours:
    """A program, and what this rank calls it with."""

    program: mf.Program
    inputs: list[Tensor | None]
    names: list[str]

    def __call__(self) -> Results:
        loss, *gradients = self.program.run(*self.inputs)
        return loss, {n: x for n, x in zip(self.names, gradients, strict=True) if x is not None}


def _ours(bench: Bench, schedule: str, options: mf.Options) -> _Ours:
    """A step of all stages: the loss, and the gradients of all weights."""
    places = [DeviceMesh([r], axes=["tp"]) for r in range(bench.stages)]
    build = _Build(bench, schedule)
    with build.fd as fd:
        h, t = build.data("x", bench.x, places[0]), build.data("t", bench.t, places[-1])
        wrt = []
        for n, mesh in enumerate(places):
            w = build.weights(n, mesh)
            wrt += [w[name] for name in bench.weights]
            h = bench.stage(w, fd.ops.set(h).on(mesh, {}) if n else h)
        loss = fd.ops.mse_loss(h, t)
        for value in (loss, *mf.grad(loss, wrt)):
            fd.add_output(value)
    program = mf.pipeline(
        fd,
        microbatches=bench.microbatches,
        batch={"x": 0, "t": 0},
        schedule=schedule,
        options=options,
    )
    return _Ours(program=program, inputs=build.inputs, names=[*bench.weights] * bench.stages)


def _alone(bench: Bench, options: mf.Options) -> _Ours:
    """The work of all stages, each by itself: what comes from others is there before."""
    build = _Build(bench, "alone")
    batch, wanted = {}, list[Any]()
    with build.fd as fd:
        for n in range(bench.stages):
            mesh = DeviceMesh([n], axes=["tp"])
            w = build.weights(n, mesh)
            x, t = build.data(f"x{n}", bench.x, mesh), build.data(f"t{n}", bench.t, mesh)
            batch |= {f"x{n}": 0, f"t{n}": 0}
            wrt = [*([x] if n else []), *(w[name] for name in bench.weights)]
            y = bench.stage(w, x)
            if n < bench.stages - 1:
                wanted += [y, *mf.grad(y, wrt, seed=t)]
            else:
                loss = fd.ops.mse_loss(y, t)
                wanted += [loss, *mf.grad(loss, wrt)]
        for value in wanted:
            fd.add_output(value)
    k = range(bench.microbatches)
    rows = [[f"{n}{phase}{m}" for m in k for phase in "FB"] for n in range(bench.stages)]
    program = mf.pipeline(
        fd,
        microbatches=bench.microbatches,
        batch=batch,
        schedule=mf.Schedule.from_rows(rows),
        options=options,
    )
    return _Ours(program=program, inputs=build.inputs, names=[""] * (len(wanted) - 1))


class _Build:
    """A definition, and the inputs of this rank."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.inputs = bench, list[Tensor | None]()
        self.fd = mf.FusionDefinition(f"step_{name}")

    def data(self, name: str, x: Tensor, mesh: DeviceMesh) -> Any:
        """An input that lies on one rank."""
        self.inputs.append(x if self.bench.ranks.comm.rank in mesh else None)
        return self.fd.define_tensor(list(x.shape), x.dtype, mesh, name=name)

    def weights(self, stage: int, mesh: DeviceMesh) -> dict[str, Any]:
        """Those of a stage, and its angles."""
        given = {**self.bench.weights, **self.bench.angles}
        return {name: self.data(f"s{stage}.{name}", x, mesh) for name, x in given.items()}


# -- figures ---------------------------------------------------------------------------------------


def _reference(bench: Bench) -> Results:
    """The loss, and the gradients of this rank's stage, on this rank in float64."""
    case, device = bench.case, bench.ranks.device
    angles = {name: x.double() for name, x in bench.angles.items()}
    stages = []
    for n in range(bench.stages):
        drawn = _drawn(case, n, bench.layers, device, bench.x.dtype)
        stages.append({name: x.double() for name, x in drawn.items()})
    mine = stages[bench.ranks.comm.rank]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for x in mine.values():
        x.requires_grad_()
    with torch.enable_grad():
        for x, t in zip(bench.x.split(1), bench.t.split(1), strict=True):
            h = x.double()
            for w in stages:
                h = bench.stage({**w, **angles}, h)
            loss = F.mse_loss(h, t.double()) / bench.microbatches
            loss.backward()
            total += loss.detach()
    return total, {name: x.grad for name, x in mine.items() if x.grad is not None}


def _compare(what: str, results: Results, want: Results) -> None:
    """Raise AssertionError where a result is wrong."""
    loss, gradients = results
    pairs = {name: (gradients[name], right) for name, right in want[1].items()}
    if loss is not None and want[0] is not None:
        pairs["the loss"] = loss, want[0]
    for name, (got, right) in pairs.items():
        norm = torch.linalg.vector_norm
        error = float(norm(got.double() - right) / norm(right))
        if not error < _TOLERANCE[got.dtype]:
            raise AssertionError(f"{what}: a relative error of {error:.2g} in {name}")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The measurement.

    Attributes:
        bench: what is measured.
        options: mdfuse's.
        compiler: the backend of torch.compile; None: it is left out.
        rounds: how many.
        costs: what predicts the bubble; None: nothing does.
        note: what to do with a line on how far it is.
    """

    bench: Bench
    options: mf.Options
    compiler: str | None
    rounds: int
    costs: Costs | None
    note: Callable[[str], None]

    def rows(self, schedules: Sequence[str]) -> Iterator[Row]:
        """The figures of schedules, each as soon as it is measured; results are compared first."""
        bench, want = self.bench, _reference(self.bench)
        stages: dict[str, Stage] = {"torch": stage_of(bench, None)}
        if self.compiler is not None:
            stages["torch, compiled"] = stage_of(bench, self.compiler)
        alone = self._ready("the work of each stage", lambda: _alone(bench, self.options))
        for name in schedules:
            ours = self._ready(name, lambda name=name: _ours(bench, name, self.options), want)
            calls: dict[str, Callable[[], Any]] = {"ours": ours, "alone": alone}
            for peer, module in stages.items():
                if name == "zb1p" and peer != "torch":
                    continue  # a graph that is compiled goes back in one piece
                maker = partial(step_of, bench, name, module)
                calls[peer] = self._ready(f"{peer}: {name}", maker, want)
            for line in eagerly(ours.program):
                self.note(f"{name}: not compiled or captured: {line}")
            yield from self._schedule(name, ours, alone, calls)

    def _ready(self, what: str, make: Callable[[], C], want: Results | None = None) -> C:
        """Make a step, and run it until it is compiled, captured, and right."""
        begin = time.perf_counter()
        call = make()
        ready = time.perf_counter()
        for _ in range(3):  # eager, captured, replayed
            results = call()
            if want is not None:
                _compare(what, results, want)
        self.bench.ranks.settle()
        end = time.perf_counter()
        self.note(f"{what}: made in {ready - begin:.1f} s, compiled in {end - ready:.1f} s")
        return call

    def _schedule(
        self, name: str, ours: _Ours, alone: _Ours, calls: Mapping[str, Callable[[], Any]]
    ) -> Iterator[Row]:
        """All figures of a schedule."""
        times = interleave(
            {peer: Contender(call=call) for peer, call in calls.items()},
            rounds=self.rounds,
            batch=1,
            settle=self.bench.ranks.settle,
            stopwatch=partial(makespan_of, self.bench.ranks),
        )
        yield from self._bubbles(name, ours, alone, times)
        for peer in [x for x in times if x not in ("ours", "alone")]:
            yield self._row(f"{name}: time", times["ours"], times[peer], peer, _TIME)
        if self.bench.ranks.device.type == "cuda":
            yield self._peak(name)

    def _bubbles(
        self, name: str, ours: _Ours, alone: _Ours, times: Mapping[str, list[float]]
    ) -> Iterator[Row]:
        """Compare a step's time beyond the work of a stage with the table's share of that work.

        The table knows of no hand-overs. Costs do: of their time, and that work beside is slower.
        """
        schedule = ours.program.schedule
        assert schedule is not None
        timed = schedule.timed()
        share = timed.bubble[0] / timed.work[0]
        beyond = [step - work for step, work in zip(times["ours"], times["alone"], strict=True)]
        formula = [work * share for work in times["alone"]]
        yield self._row(f"{name}: bubble", beyond, formula, "formula", _BUBBLE)
        if self.costs is not None:
            step, work = (x.program.timeline(self.costs).seconds for x in (ours, alone))
            predicted = [(step - work) * 1e9] * len(beyond)
            yield self._row(f"{name}: bubble", beyond, predicted, "predicted", None)

    def _peak(self, name: str) -> Row:
        """Bytes of a step on this rank that is not captured, beside what its program says."""
        device, rank = self.bench.ranks.device, self.bench.ranks.comm.rank
        ours = _ours(self.bench, name, replace(self.options, graph="never"))
        given = sum(x.numel() * x.element_size() for x in ours.inputs if x is not None)
        ours()  # which compiles
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        ours()
        torch.cuda.synchronize(device)
        took = torch.cuda.max_memory_allocated(device) - before + given
        predicted = memory_of(project(ours.program.host, rank)).peak
        return self._row(f"{name}: peak", [took], [predicted], "predicted", _PEAK, "MiB")

    def _row(
        self,
        name: str,
        ours: list[float],
        against: list[float],
        alternative: str,
        limit: float | None,
        unit: Any = "ms",
    ) -> Row:
        bench = self.bench
        tokens = bench.case.tokens
        return Row(
            name=f"{bench.case.model.name}, {name}",
            sizes=f"{bench.stages} x {bench.layers} layers, {bench.microbatches} x {tokens} tokens",
            unit=unit,
            ours=ours,
            against=against,
            alternative=alternative,
            limit=limit,
        )
