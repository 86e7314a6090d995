"""Common parts of all benchmarks: interleaved timing, statistics, one table, one JSON file.

Contenders run in one process, in rounds of random order, so that what disturbs the machine disturbs
them alike; a figure is a ratio (or a difference) within each round, and its median over rounds.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mdfuse
from mdfuse.seeing.cost_tables import processor

#: Times a batch of calls: (calls) -> nanoseconds.
Stopwatch = Callable[[Callable[[], None]], float]

#: unit -> how many of it are in what is stored.
_UNITS = {"us": 1e-3, "ms": 1e-6, "MiB": 1 / 2**20, "of 1": 1.0}

#: unit -> what is stored.
_STORED = {"us": "ns", "ms": "ns", "MiB": "bytes", "of 1": "relative error"}

#: Width of the table where the output is no terminal.
_WIDTH = 170


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of the alternatives that are compared.

    Attributes:
        call: what is timed.
        fresh: makes the argument of each timed call, untimed; without it `call` gets none.
    """

    call: Callable[..., object]
    fresh: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of some rounds."""

    median: float
    low: float
    high: float
    least: float
    most: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Median, quartiles and extremes."""
        if len(samples) < 2:
            return Spread(*(samples[0],) * 5)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(median, low, high, min(samples), max(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a figure, and what is allowed.

    Attributes:
        name: what is measured.
        sizes: the shapes or counts it was measured with.
        unit: "us", "ms" or "MiB"; "of 1" for relative errors.
        ours: nanoseconds per call (or bytes, or the error) in each round.
        against: the same of the alternative.
        alternative: what the alternative is.
        kind: the figure: ours / against, or (ours - against) / `per` in `unit`.
        per: instructions in one call.
        limit: what the figure must not exceed; None: it is shown for information.
    """

    name: str
    sizes: str
    unit: Literal["us", "ms", "MiB", "of 1"]
    ours: Sequence[float]
    against: Sequence[float]
    alternative: str
    limit: float | None
    kind: Literal["ratio", "added"] = "ratio"
    per: int = 1

    @property
    def figures(self) -> list[float]:
        """The figure of each round."""
        pairs = zip(self.ours, self.against, strict=True)
        if self.kind == "ratio":
            return [ours / against for ours, against in pairs]
        return [(ours - against) / self.per * _UNITS[self.unit] for ours, against in pairs]

    @property
    def holds(self) -> bool | None:
        """Return whether the median figure is within the limit; None without a limit."""
        if self.limit is None:
            return None
        return Spread.of(self.figures).median <= self.limit


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect before, not during."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def eagerly(program: mdfuse.Program) -> list[str]:
    """Yield the parts of a program that are neither compiled nor captured, with the reasons."""
    lines = map(str.strip, program.explain().splitlines())
    return [line for line in lines if _EAGER.search(line)]


#: As `explain()` says it, of units and of what graphs leave out.
_EAGER = re.compile(r": runs? eagerly, ")


def origins(program: mdfuse.Program) -> list[str]:
    """Return the lines on who compiled the functions of a program, or where they were found."""
    lines = map(str.strip, program.explain().splitlines())
    return [line for line in lines if _ORIGIN.match(line)]


#: As `explain()` says it.
_ORIGIN = re.compile(r"\d+ (compiled|found in files|left to this process)\b")


def host_time(calls: Callable[[], None]) -> float:
    """Host time in nanoseconds; nothing waits for a device."""
    start = time.perf_counter_ns()
    calls()
    return float(time.perf_counter_ns() - start)


def processor_time(calls: Callable[[], None]) -> float:
    """Time of this process on processors in nanoseconds, all its threads together."""
    start = time.process_time_ns()
    calls()
    return float(time.process_time_ns() - start)


def device_time(calls: Callable[[], None], ahead: int = 0) -> float:
    """Nanoseconds between two events on the current stream of the GPU.

    Args:
        calls: queue work.
        ahead: clock cycles for which the GPU is kept busy before, so that what the host needs
            until the first call is queued does not count.
    """
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    if ahead:
        torch.cuda._sleep(ahead)
    start.record()
    calls()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6


def interleave(
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    batch: int,
    settle: Callable[[], object],
    stopwatch: Stopwatch = host_time,
    warm: int = 3,
) -> dict[str, list[float]]:
    """Nanoseconds per call of each contender in each round.

    Args:
        contenders: by name.
        rounds: how often each has its turn, in a new order each time. All ranks draw the same.
        batch: calls per turn; small enough that a GPU's launch queue never fills.
        settle: waits until nothing is under way on any rank; called before and after each turn.
        stopwatch: what is timed.
        warm: calls before; none where the contenders have run already.
    """
    draw, samples = random.Random(0), {name: list[float]() for name in contenders}
    for contender in contenders.values():  # warm: plans, caches, connections
        if warm:
            _turn(contender, max(warm, batch), settle, stopwatch)
    with _no_garbage_collection():
        for _ in range(rounds):
            for name in draw.sample(list(contenders), len(contenders)):
                samples[name].append(_turn(contenders[name], batch, settle, stopwatch) / batch)
    return samples


def _turn(
    contender: Contender, batch: int, settle: Callable[[], object], stopwatch: Stopwatch
) -> float:
    """The time of one batch."""
    call, fresh = contender.call, contender.fresh
    arguments = None if fresh is None else [fresh() for _ in range(batch)]

    def calls() -> None:
        if arguments is None:
            for _ in range(batch):
                call()
        else:
            for argument in arguments:
                call(argument)

    settle()
    elapsed = stopwatch(calls)
    settle()
    return elapsed


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print the table."""
    if not console.is_terminal:
        console.width = _WIDTH
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name, justify in (
        ("what", "left"),
        ("sizes", "left"),
        ("ours", "right"),
        ("against", "right"),
        ("", "left"),
        ("figure (quartiles)", "right"),
        ("limit", "right"),
        ("holds", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)


_VERDICTS = {None: Text(""), True: Text("yes", "green"), False: Text("NO", "bold red")}


def _cells(row: Row) -> list[str | Text]:
    ours, against = (_amount(Spread.of(x).median, row.unit) for x in (row.ours, row.against))
    verdict = _VERDICTS[row.holds]
    figure, limit = _figure_text(row)
    return [row.name, row.sizes, ours, against, row.alternative, figure, limit, verdict]


def _amount(value: float, unit: str) -> str:
    return f"{value * _UNITS[unit]:.4g} {unit}"


def _figure_text(row: Row) -> tuple[str, str]:
    x = Spread.of(row.figures)
    unit, digits = ("x", ".3f") if row.kind == "ratio" else (f"{row.unit} each", "+.2f")
    limit = "" if row.limit is None else f"{row.limit:g} {unit}"
    return f"{x.median:{digits}} {unit} ({x.low:{digits}} – {x.high:{digits}})", limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The stored results of one run of a benchmark."""

    benchmark: str
    arguments: Mapping[str, Any]
    rows: Sequence[Row]
    where: Mapping[str, Any]
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def write(self, path: Path) -> None:
        """Write everything as JSON, raw rounds included."""
        content = {
            "benchmark": self.benchmark,
            "date": self.date,
            "arguments": dict(self.arguments),
            "world": dict(self.where),
            "machine": _machine(),
            "versions": _versions(),
            "rows": [_stored(row) for row in self.rows],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _stored(row: Row) -> dict[str, Any]:
    """Times in nanoseconds, sizes in bytes."""
    spreads = {"ours": row.ours, "against": row.against, "figure": row.figures}
    return {
        "name": row.name,
        "sizes": row.sizes,
        "alternative": row.alternative,
        "kind": row.kind,
        "per": row.per,
        "measured": _STORED[row.unit],
        "limit": row.limit,
        "holds": row.holds,
        **{name: asdict(Spread.of(samples)) for name, samples in spreads.items()},
        "rounds": {"ours": list(row.ours), "against": list(row.against)},
    }


def _machine() -> dict[str, Any]:
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "system": platform.platform(),
    }


def _versions() -> dict[str, str | None]:
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    nccl: Any = torch.cuda.nccl
    return {
        "mdfuse": mdfuse.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if has_nccl else None,
    }
