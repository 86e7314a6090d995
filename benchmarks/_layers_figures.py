"""Figures of one layer: time on the device and on the host, bytes at the peak, the error."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from _layers_models import Case
from _layers_peers import PEERS, Bench, reference
from _measure import Contender, Row, Stopwatch, device_time, eagerly, host_time, interleave
from _ranks import Ranks
from torch import Tensor

import mdfuse as mf

#: Calls of a turn where layers follow each other; even eager ones fit into a GPU's queue.
_FOLLOWING = 8

#: Clock cycles, about four milliseconds: the host needs half of that to queue eight eager layers.
_AHEAD = 8_000_000

#: dtype -> the largest error of a layer, relative to the norm of the result.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of times on GPUs.

    Attributes:
        times: contender -> mdfuse's time on the device, as a multiple of its.
        host_us: time of the host by itself, for runs of `inputs` tensors; None: of any number.
        memory: at the peak, as a multiple of that of the compiled graph.
        error: as a multiple of that of the compiled layer.
        on_ranks: several may communicate; else the limits are those of one.
    """

    times: Mapping[str, float]
    host_us: float
    inputs: int | None
    memory: float = 1.05
    error: float = 1.1
    on_ranks: bool = False


_LIMITS = Limits(times={"compiled-graph": 1.02, "graph": 1.0}, host_us=25.0, inputs=12)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A contender in its steady state, whose result was compared.

    Attributes:
        call: one layer.
        peak: the most bytes it had allocated, inputs and weights left out; 0 on a CPU.
        error: of its result, relative to the norm of the right one.
    """

    call: Callable[[], Any]
    peak: int
    error: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement of a layer.

    Attributes:
        ranks: on which ranks.
        rounds: how many.
        peers: names of the contenders.
        options: mdfuse's; None: those of the environment.
        compiler: the backend of torch.compile.
        limits: what is allowed.
        left_out: what torch could not run or capture, and why; filled while measuring.
        is_sequence: each rank has some of the tokens of x.
        programs: mdfuse's of the layer that is measured.
        eager: what mdfuse ran eagerly, and why; filled while measuring.
    """

    ranks: Ranks
    rounds: int
    peers: tuple[str, ...]
    options: mf.Options | None
    compiler: str
    limits: Limits = _LIMITS
    left_out: dict[str, str] = field(default_factory=dict)
    is_sequence: bool = False
    programs: list[mf.Program] = field(default_factory=list)
    eager: list[str] = field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"

    @property
    def has_limits(self) -> bool:
        """Times are a GPU's, and communication is out of the picture, or meant."""
        return self.is_gpu and (self.ranks.comm.size == 1 or self.limits.on_ranks)

    def lines(self) -> Iterator[str]:
        """Lines on what was not measured as it was meant to be."""
        yield from (f"left out: {what}: {why}" for what, why in self.left_out.items())
        yield from (f"not compiled or captured: {line}" for line in self.eager)


def bench(plan: Plan, case: Case) -> Bench:
    """The layer with random inputs: bfloat16 on GPUs, float32 on CPUs."""
    dtype = torch.bfloat16 if plan.is_gpu else torch.float32
    wholes = case.draw(plan.ranks.device, dtype)
    layouts = case.layouts(plan.ranks.mesh, plan.is_sequence)
    return Bench(
        ranks=plan.ranks,
        case=case,
        wholes=wholes,
        parts={name: plan.ranks.local(x, layouts[name]).clone() for name, x in wholes.items()},
        options=plan.options,
        compiler=plan.compiler,
        is_sequence=plan.is_sequence,
        programs=plan.programs,
    )


def prepare(plan: Plan, layer: Bench) -> dict[str, Ready]:
    """Every contender, compared with the layer in float64 on one device.

    Raises:
        AssertionError: a result is wrong.
    """
    torch.compiler.reset()  # else the layers before count as recompilations
    want = reference(layer)
    calls: dict[object, Callable[[], Tensor]] = {}
    prepared = {}
    for name in plan.peers:
        make = PEERS[name].make
        try:
            if make not in calls:  # a graph is of the function that also runs without one
                calls[make] = make(layer)
            steady, peak = settled(plan, calls[make], PEERS[name].steady)
        except RuntimeError as error:
            if not name.startswith("dtensor"):
                raise
            plan.left_out[f"{layer.case.name}: {name}"] = f"{type(error).__name__}: {error}"
            continue
        error_of = 0.0 if PEERS[name].lacks else _error(layer, steady, want)
        if not error_of < _TOLERANCE[layer.parts["x"].dtype]:
            raise AssertionError(f"{layer.case.name}, {name}: a relative error of {error_of:.2g}")
        prepared[name] = Ready(call=steady, peak=peak, error=error_of)
    return prepared


_Call = Callable[[], Any]


def settled(
    plan: Plan, call: _Call, steady_of: Callable[[_Call], _Call] = lambda call: call
) -> tuple[_Call, int]:
    """The call after plans, compilations and captures, and its peak without compilations.

    Args:
        plan: on what device.
        call: the contender's.
        steady_of: makes of it what is timed, for example a graph.
    """
    if not plan.is_gpu:
        call()
        return steady_of(call), 0
    x = torch.ones(64, 64, dtype=torch.bfloat16, device=plan.ranks.device)
    torch.mm(x, x)  # cuBLAS's workspace, which all share
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):  # kernels are chosen in the first run of what is compiled
        call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    steady = steady_of(call)
    for _ in range(3):
        steady()
    torch.cuda.synchronize()
    return steady, torch.cuda.max_memory_allocated() - before


def _error(layer: Bench, call: Callable[[], Tensor], want: Tensor) -> float:
    """The error of a result that was computed anew, from an x that the call did not see before."""
    inputs = layer.parts["x"], layer.wholes["x"]
    right = [x.clone() for x in inputs]
    for x in inputs:
        x.normal_()
    call().fill_(torch.nan)  # the memory that the next result gets, as a rule
    for x, before in zip(inputs, right, strict=True):
        x.copy_(before)
    got = call().double()
    if got.shape != want.shape:  # this rank's tokens
        want = layer.ranks.local(want, layer.case.layouts(layer.ranks.mesh, True)["x"])
    return float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want))


def rows(plan: Plan, case: Case) -> Iterator[Row]:
    """The figures of one layer: mdfuse against every other contender."""
    ready = prepare(plan, bench(plan, case))
    yield from figures(plan, case, ready)


def figures(plan: Plan, case: Case, ready: Mapping[str, Ready]) -> Iterator[Row]:
    """Times, bytes and errors of contenders that are ready."""
    if plan.is_gpu:
        yield from _times(plan, case, ready, "GPU, one call", device_time, 1)
        yield from _times(plan, case, ready, "GPU, queued", _queued, _FOLLOWING)
        yield from _times(plan, case, ready, "host, in turns", host_time, _FOLLOWING)
        yield from _by_itself(plan, case, ready)
        yield from _peaks(plan, case, ready)
    else:
        yield from _times(plan, case, ready, "time", host_time, 1)
    yield from _errors(plan, case, ready)
    plan.eager.extend(f"{case.name}: {line}" for p in plan.programs for line in eagerly(p))
    plan.programs.clear()


def _queued(calls: Callable[[], None]) -> float:
    """Time on the GPU alone: the host queues everything while the GPU still waits."""
    return device_time(calls, _AHEAD)


def _others(ready: Iterable[str]) -> list[str]:
    return [name for name in ready if name != "mdfuse"]


def _times(
    plan: Plan,
    case: Case,
    ready: Mapping[str, Ready],
    what: str,
    stopwatch: Stopwatch,
    batch: int,
) -> Iterator[Row]:
    """In turns, so that what disturbs the machine disturbs all of them."""
    times = _timed(plan, ready, stopwatch, batch)
    limits = plan.limits.times if plan.has_limits and stopwatch is _queued else {}
    yield from _beside(case, what, times, limits)


def _by_itself(plan: Plan, case: Case, ready: Mapping[str, Ready]) -> Iterator[Row]:
    """Time of the host where nothing else has run since the last call: what a replay takes.

    In turns the first call of each finds the processor's caches full of the other contenders.
    """
    times: dict[str, list[float]] = {}
    for name, one in ready.items():
        times |= _timed(plan, {name: one}, host_time, _FOLLOWING)
    what, limits = "host, by itself", plan.limits
    yield from _beside(case, what, times, {})
    if plan.has_limits and limits.inputs in (None, len(case.shapes())):
        yield Row(
            name=f"{case.name}: {what}",
            sizes=f"{limits.inputs} inputs" if limits.inputs else case.sizes,
            unit="us",
            ours=times["mdfuse"],
            against=[0.0] * plan.rounds,
            alternative="nothing",
            limit=limits.host_us,
            kind="added",
        )


def _timed(
    plan: Plan, ready: Mapping[str, Ready], stopwatch: Stopwatch, batch: int
) -> dict[str, list[float]]:
    return interleave(
        {name: Contender(call=one.call) for name, one in ready.items()},
        rounds=plan.rounds,
        batch=batch,
        settle=plan.ranks.settle,
        stopwatch=stopwatch,
    )


def _beside(
    case: Case, what: str, times: Mapping[str, list[float]], limits: Mapping[str, float]
) -> Iterator[Row]:
    for name in _others(times):
        yield Row(
            name=f"{case.name}: {what}",
            sizes=case.sizes,
            unit="us",
            ours=times["mdfuse"],
            against=times[name],
            alternative=name,
            limit=limits.get(name),
        )


def _peaks(plan: Plan, case: Case, ready: Mapping[str, Ready]) -> Iterator[Row]:
    for name in _others(ready):
        is_limited = plan.has_limits and name == "compiled-graph"
        yield Row(
            name=f"{case.name}: memory at the peak",
            sizes=case.sizes,
            unit="MiB",
            ours=[ready["mdfuse"].peak],
            against=[ready[name].peak],
            alternative=name,
            limit=plan.limits.memory if is_limited else None,
        )


def _errors(plan: Plan, case: Case, ready: Mapping[str, Ready]) -> Iterator[Row]:
    for name in sorted(ready.keys() & {"eager", "compiled", "ddp", "ddp-compiled"}):
        is_limited = plan.has_limits and name == "compiled"
        yield Row(
            name=f"{case.name}: error against float64",
            sizes=case.sizes,
            unit="of 1",
            ours=[ready["mdfuse"].error],
            against=[ready[name].error],
            alternative=name,
            limit=plan.limits.error if is_limited else None,
        )
