"""Measure the subjects of a calibration, and small programs that it is then judged by."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mdfuse.cli.calibration.microbenchmarks import (
    OPTIONS,
    Microbenchmark,
    chains,
    linear,
)
from mdfuse.cli.calibration.scales import Scale
from mdfuse.cli.calibration.sending import BESIDE, Backends, Way, beside, posting, received, ways
from mdfuse.cli.calibration.suite import subjects
from mdfuse.cli.calibration.timed_samples import (
    QUEUED,
    WALL,
    Call,
    own_clock,
    samples_of,
    seconds_of,
)
from mdfuse.compiled.program import Program
from mdfuse.config import Options
from mdfuse.errors import BackendError
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.interpreter.garbage import collected
from mdfuse.ir.graph import dtype_name
from mdfuse.mesh import DeviceMesh
from mdfuse.runtime.communicator import Communicator
from mdfuse.seeing.cost_keys import LinkKey, WorkKey
from mdfuse.seeing.costs import MOST_SLOWED, Costs, Link
from mdfuse.seeing.curves import Curve, Grid

#: The key of a measurement: a word for what is measured once.
Key = LinkKey | WorkKey | str

#: Table -> the reader of its keys.
_READ: Mapping[str, Callable[[str], Key]] = {
    **dict.fromkeys(("links", "colds", "slows"), LinkKey.of),
    **dict.fromkeys(("works", "products", "attentions"), WorkKey.of),
    "run": str,
}

#: Subjects between two runs of the same probe, whose times say how calm the machine is.
_EVERY = 16

#: The longest communication beside a product, as a share of the product's time.
_SHORTER = 0.8

#: Subjects that are prepared together.
_KEPT = 4


def arguments(host: HostProgram, comm: Communicator) -> dict[str, Any]:
    """Return random inputs for this rank of a program without numbers and integers."""
    inputs: dict[str, Any] = {}
    for name in host.inputs:
        kind = host.types[name]
        inputs[name] = None
        if comm.rank in kind.placed.mesh:
            inputs[name] = _random(kind.local_shape(comm.rank), kind.dtype, comm.device)
    return inputs


#: The number of random numbers, which are repeated: a CPU draws them slower than it multiplies.
_DRAWN = 1 << 16


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = torch.randn(_DRAWN, dtype=dtype, device=device)
    size = math.prod(shape)
    return drawn.repeat(-(-size // _DRAWN))[:size].view(shape)


@dataclass
class Measurements:
    """The measurements so far.

    Attributes:
        comm: the ranks.
        scale: of the subjects.
        backends: whose communications are measured, and the options that name them.
        times: table and key -> seconds by size, of one repetition in a run.
        calm: seconds of the probe, again and again.
        report: is called with a line for each kind of subjects: how long it took.
        alone: this rank by itself, where ranks share local work out among them; None: each does
            all of it.
    """

    comm: Communicator
    scale: Scale
    report: Callable[[str], object] = print
    backends: Backends = field(default_factory=lambda: {None: OPTIONS})
    times: dict[tuple[str, Key], dict[Any, float]] = field(default_factory=dict)
    calm: list[float] = field(default_factory=list)
    alone: Communicator | None = None

    def begin(self) -> None:
        """Measure the fixed time of a run; its imports then do not count for other subjects.

        Communications that are measured behind other work include the additional time of a run.
        """
        self.times["run", "run"] = {1: self._run()}
        is_more = self.comm.size > 1 and not self.scale.between_s
        self.times["run", "posting"] = {1: self._posting() if is_more else 0.0}

    def take(self, advance: Callable[[], object]) -> None:
        """Measure all other subjects; `advance` is called for each."""
        probe = self._probe()
        for n, some in enumerate(self._subjects(advance)):
            self._measure(some)
            if n * _KEPT % _EVERY == 0:
                self.calm += samples_of(self.alone or self.comm, probe, 1)
        self._take_slows(advance)
        self._share()

    def _subjects(self, advance: Callable[[], object]) -> Iterator[list[Microbenchmark]]:
        """Yield this rank's subjects in groups; after each kind the ranks share its times."""
        for name, some in subjects(self.scale, self.comm.size, self.backends).items():
            start, mine = time.perf_counter(), self._mine(some(), advance)
            while chunk := [*itertools.islice(mine, _KEPT)]:
                yield chunk
            self._share()
            self.report(f"{name}: {time.perf_counter() - start:.1f} s")

    def _mine(
        self, some: Iterable[Microbenchmark], advance: Callable[[], object]
    ) -> Iterator[Microbenchmark]:
        """Yield the subjects of this rank: ranks share out local work."""
        for n, subject in enumerate(some):
            if self._ranks(subject) is self.comm or n % self.comm.size == self.comm.rank:
                yield subject
            advance()

    def _measure(self, some: Sequence[Microbenchmark]) -> None:
        """Measure subjects that are prepared together."""
        collected()  # buffers of earlier subjects are garbage
        calls = [self._run_of(x.program, x.options, self._ranks(x)) for x in some]
        for subject, call in zip(some, calls, strict=True):
            self._note(subject, self._once(subject, call))

    def _probe(self) -> Call:
        """Return a run of the probe: a product that is timed again and again."""
        n = self.scale.features[1]
        mesh = DeviceMesh.arange(x=self.comm.size)
        subject = linear(self.scale, mesh, self.scale.dtypes[0], self.scale.rows[-1], n, n)
        return self._run_of(subject.program, subject.options, self._ranks(subject))

    def _ranks(self, subject: Microbenchmark) -> Communicator:
        """Return the ranks that run a subject: all for communications, else each by itself."""
        return self.comm if subject.is_sent else self.alone or self.comm

    def _note(self, subject: Microbenchmark, seconds: float) -> None:
        """Keep the seconds of a subject, less those of the other work of its program."""
        if subject.local:
            mine, costs = project(subject.program, 0), self.costs
            seconds -= sum(costs.seconds(mine, i) for i in subject.local)
        self.times.setdefault((subject.table, subject.key), {})[subject.at] = seconds

    def _once(self, subject: Microbenchmark, call: Call) -> float:
        """Return the seconds of one repetition of a subject in a run."""
        comm = self._ranks(subject)
        clock = WALL if subject.is_sent else own_clock()
        seconds = seconds_of(comm, call, subject.runs, clock)
        if subject.without is not None:
            baseline = self._run_of(subject.without, subject.options)
            seconds -= seconds_of(comm, baseline, subject.runs, clock)
        else:
            seconds -= self.times["run", "run"][1]
            seconds -= self.times["run", "posting"][1] if subject.is_sent else 0.0
        return max(seconds, 0.0) / subject.times

    def _take_slows(self, advance: Callable[[], object]) -> None:
        """Measure how much slower work is beside each kind of communication."""
        start, costs = time.perf_counter(), self.costs
        product = costs.products[WorkKey("linear", dtype_name(self.scale.dtypes[0]))]
        rows, n = self.scale.beside
        most = _SHORTER * product.seconds(rows, n, n)
        for way in ways(self.comm.size, self.backends):
            size, sent = self._longest(way, costs.links[way.key], most)
            alone, both = (self._beside(way, size, sends=sends) for sends in (False, True))
            both -= self.times["run", "posting"][1]
            self.times["slows", way.key] = {1: share(alone, BESIDE * sent, both)}
            advance()
        self.report(f"work beside communications: {time.perf_counter() - start:.1f} s")

    def _beside(self, way: Way, size: int, *, sends: bool) -> float:
        program = beside(self.scale, way, size, sends=sends)
        return seconds_of(self.comm, self._run_of(program, way.options), 1)

    def _longest(self, way: Way, link: Link, most: float) -> tuple[int, float]:
        """Return the size of the longest communication below some seconds, and its own."""
        for size in self.scale.messages[::-1]:
            sent = link.seconds(received(beside(self.scale, way, size, sends=True)))
            if sent < most:
                break
        return size, sent

    def _run(self) -> float:
        """Return the fixed seconds of a run: the time that is left when it does nothing.

        Two programs are timed, one of which does twice as much as the other.
        """
        few, many = (
            seconds_of(self.comm, call_of(self.comm, program), QUEUED, own_clock())
            for program in chains(self.scale, self.comm.size)
        )
        return max(0.0, 2 * few - many)

    def _posting(self) -> float:
        """Return the additional seconds of a run that communicates, from two programs likewise."""
        few, many = (
            seconds_of(self.comm, self._run_of(host, self.backends[None]), QUEUED)
            for host in posting(self.scale, self.comm.size, self.backends[None])
        )
        return max(0.0, 2 * few - many - self.times["run", "run"][1])

    def _run_of(
        self, program: HostProgram, options: Options, comm: Communicator | None = None
    ) -> Callable[[], object]:
        evaluator = HostIrEvaluator(program, comm or self.comm, options)
        given = arguments(program, self.comm)
        return lambda: evaluator.run(given)

    def _share(self) -> None:
        """Let all ranks have all times, or medians where several measured: they predict alike."""
        rows = [[x, str(key), [*points.items()]] for (x, key), points in self.times.items()]
        self.times = dict(self._middle(json.dumps([rows, self.calm])))

    def _middle(self, mine: str) -> Iterator[tuple[tuple[str, Key], dict[Any, float]]]:
        texts = self.comm.all_ok(mine)
        if any(text is None for text in texts):
            raise BackendError("a rank left the calibration")
        everyone = [json.loads(text) for text in texts if text is not None]
        calms = [calm for _, calm in everyone]  # ranks with less work have fewer
        self.calm = [statistics.median(x) for x in zip(*calms, strict=False)]
        samples: dict[tuple[str, Key], dict[Any, list[float]]] = {}
        for table, key, points in (row for rows, _ in everyone for row in rows):
            of_key = samples.setdefault((table, _READ[table](key)), {})
            for at, seconds in points:
                of_key.setdefault(tuple(at) if isinstance(at, list) else at, []).append(seconds)
        for name, times in samples.items():
            yield name, {at: statistics.median(seconds) for at, seconds in times.items()}

    @property
    def spread(self) -> float:
        """The spread of times of the same work: between the quartiles, as a share of the median."""
        if len(self.calm) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.calm, n=4, method="inclusive")
        return (high - low) / middle

    @property
    def costs(self) -> Costs:
        """The table of the measurements so far."""
        by = defaultdict[str, dict[Any, dict[Any, float]]](dict)
        for (table, key), points in self.times.items():
            by[table][key] = {at: max(seconds, _LEAST_S) for at, seconds in points.items()}
        works = {key: Curve.of(points) for key, points in by["works"].items()}
        links = {
            key: Link(
                curve=Curve.of(points),
                slows=self._slows(key),
                cold=_slowdown(points, by["colds"].get(key, {})),
            )
            for key, points in by["links"].items()
        }
        links |= {LinkKey(backend=name): link for name, link in _slowest(links).items()}
        return Costs(
            name="measured",
            launch_s=min((c.points[0][1] for c in works.values()), default=0.0),
            run_s=by["run"].get("run", {}).get(1, 0.0),
            posting_s=by["run"].get("posting", {}).get(1, 0.0),
            flops=_flops(by["products"]),
            links=links,
            works=works,
            products={key: _grid(points) for key, points in by["products"].items()},
            attentions={key: _grid(points) for key, points in by["attentions"].items()},
            multiprocessors=self.scale.multiprocessors,
            cache=self.scale.l2,
            bandwidth=_bandwidth(works),
            is_fused=self.comm.device.type == "cuda",
        )

    def _slows(self, key: LinkKey) -> float:
        return self.times.get(("slows", key), {}).get(1, 0.0)


def call_of(comm: Communicator, program: Program) -> Callable[[], object]:
    """Return a call of a program with drawn arguments."""
    given = [*arguments(program.host, comm).values()]
    return lambda: program.run(*given)


def share(product: float, communication: float, both: float) -> float:
    """Return the share of its speed that a product loses while a communication runs.

    It is 0 where the communication does not end before the product: nothing is known then.

    >>> share(10.0, 4.0, 10.5), share(10.0, 4.0, 9.9), share(10.0, 4.0, 15.0), share(1.0, 4.0, 4.0)
    (0.125, 0.0, 0.95, 0.0)
    """
    if communication > product:
        return 0.0
    return min(MOST_SLOWED, max(0.0, (both - product) / communication))


def _slowdown(points: Mapping[float, float], colds: Mapping[float, float]) -> Curve | None:
    """Return the cache-miss penalty of communications: their additional time behind other work."""
    usual = Curve.of(points)
    extra = {at: max(seconds - usual.seconds(at), _LEAST_S) for at, seconds in colds.items()}
    return Curve.of(extra) if extra else None


#: Times are above 0.
_LEAST_S = 1e-9


def _grid(points: Mapping[tuple[int, int, int], float]) -> Grid:
    axes = [sorted({at[d] for at in points}) for d in range(3)]
    times = [points[m, n, k] for m in axes[0] for n in axes[1] for k in axes[2]]
    return Grid(tuple(tuple(map(float, axis)) for axis in axes), tuple(times))


def _flops(products: Mapping[WorkKey, Mapping[tuple[int, int, int], float]]) -> float:
    rates = [2.0 * m * n * k / s for grid in products.values() for (m, n, k), s in grid.items()]
    return max(rates, default=float("inf"))


def _bandwidth(works: Mapping[WorkKey, Curve]) -> float:
    largest = [c.points[-1] for key, c in works.items() if key.name == "*"]
    return max((size / seconds for size, seconds in largest), default=float("inf"))


def _slowest(links: Mapping[LinkKey, Link]) -> dict[str | None, Link]:
    """Return the slowest link of each backend, which counts for kinds that were not measured."""
    slowest: dict[str | None, Link] = {}
    for key, link in links.items():
        if key.backend not in slowest or _much(link) > _much(slowest[key.backend]):
            slowest[key.backend] = link
    return slowest


def _much(link: Link) -> float:
    """Return the seconds of a large message, 16 MiB."""
    return link.seconds(1 << 24)
