"""Distances of reshards from the bound: bytes, messages, planning time, beside DTensor's planner.

python benchmarks/reshard.py
python benchmarks/reshard.py --jobs 8
mdfuse bench reshard --quick

Nothing is sent: the steps of all pairs of layouts are planned, and the elements that each rank
receives are counted; times are those of the processor. Prints the tables and the worst pairs, and
stores them as JSON. A row is about the changes of one mesh and shape; ratios are to a lower bound
of all algorithms (`_reshard_pairs.bound`), "whole" to the same in whole elements. "reachable" is
the least of three steps through layouts, "owners" a bound for one reducing rank per element,
whichever. The time of changes from mesh to mesh with known hosts follows from a model
(`_reshard_hosts`). Drawn changes on up to thousands of ranks are planned (`_reshard_planning`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from _reshard_hosts import CASES, Timed, timed
from _reshard_looks import MESHES, SHAPES, Found, Looks, Run, found_of, pairs_of, running
from _reshard_pairs import posts
from _reshard_planning import RANKS, plannings
from rich import box
from rich.table import Table

from mdfuse import DeviceMesh, Layout, Shard, communication
from mdfuse.cli import screen
from mdfuse.layouts.layout import Placement
from mdfuse.reshard.steps import _steps as planned  # without what is kept of earlier plans

_T = TypeVar("_T")
_RESULTS = Path(__file__).parent / "results" / "reshard.json"

#: Which pairs a row is about.
_GROUPS: dict[str, Callable[[Layout, Layout], bool]] = {
    "no Partial": lambda s, g: not s.partial_axes,
    "Partial, reduced": lambda s, g: bool(s.partial_axes) and not g.partial_axes,
    "Partial that stays": lambda s, g: bool(g.partial_axes),
    "Partial": lambda s, g: bool(s.partial_axes),
    "all": lambda s, g: True,
}

#: How many of the worst pairs are printed for each row.
_SHOWN = 3


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    mesh: str
    shape: tuple[int, ...]
    group: str
    pairs: int
    mean: float
    whole: float
    ninetieth: float
    most: float
    total: float
    reachable: float | None
    owners: float | None
    dtensor: float | None
    more_than_dtensor: int
    messages: float
    median_ms: float
    slow_ms: float
    spread: float
    worst: tuple[tuple[float, str, str], ...]

    @property
    def title(self) -> str:
        """The pairs of a row, in words."""
        return f"{self.mesh} {' x '.join(map(str, self.shape))}, {self.group}"


def row(mesh: DeviceMesh, shape: tuple[int, ...], group: str, measured: list[Found]) -> Row:
    """Summarise the pairs of one group."""
    ratios = sorted(f.ratio for f in measured)
    times = sorted(f.milliseconds for f in measured)
    theirs = [f for f in measured if f.dtensor is not None and f.least.worst]
    worst = sorted(measured, key=lambda f: -f.ratio)[:_SHOWN]
    return Row(
        mesh=str(mesh),
        shape=shape,
        group=group,
        pairs=len(measured),
        mean=statistics.mean(ratios),
        whole=statistics.mean(f.whole_ratio for f in measured),
        ninetieth=ratios[len(ratios) * 9 // 10],
        most=ratios[-1],
        total=sum(f.ours.total for f in measured) / max(sum(f.least.total for f in measured), 1),
        reachable=statistics.mean(x for f in measured if (x := f.reachable_ratio) is not None)
        if all(f.reachable is not None for f in measured)
        else None,
        owners=statistics.mean(x for f in measured if (x := f.owners_ratio) is not None)
        if all(f.owners is not None for f in measured)
        else None,
        dtensor=statistics.mean((f.dtensor or 0) / f.least.worst for f in theirs)
        if theirs and all(f.dtensor is not None for f in measured)
        else None,
        more_than_dtensor=sum(f.ours.worst > math.ceil(f.dtensor or 0) for f in theirs),
        messages=statistics.mean(f.messages for f in measured),
        median_ms=statistics.median(times),
        slow_ms=times[len(times) * 99 // 100],
        spread=statistics.mean([f.spread for f in measured if f.spread is not None] or [1.0]),
        worst=tuple((f.ratio, f.pair, f.steps) for f in worst),
    )


def rows(is_quick: bool, run: Run) -> Iterator[Row]:
    """Look at all pairs on each mesh."""
    shapes = SHAPES[:1] if is_quick else SHAPES
    for place, mesh in enumerate(MESHES[:1] if is_quick else MESHES):
        together = list[Found]()
        for shape in shapes:
            every = pairs_of(place, shape)
            looks = found_of(Looks(place, shape), run)
            for group, belongs in _GROUPS.items():
                inside = [f for (s, g), f in zip(every, looks, strict=True) if belongs(s, g)]
                yield row(mesh, shape, group, inside)
            together += [f for (s, _), f in zip(every, looks, strict=True) if s.partial_axes]
        yield row(mesh, (), "Partial, all shapes", together)
    for shape in shapes:
        every = pairs_of(0, shape, are_blocked=True)
        looks = found_of(Looks(0, shape, are_blocked=True), run)
        for group, belongs in _GROUPS.items():
            inside = [f for (s, g), f in zip(every, looks, strict=True) if belongs(s, g)]
            yield row(MESHES[0], shape, f"blocks; {group}", inside)


# -- large meshes --------------------------------------------------------------------------------

_LARGE: dict[str, tuple[dict[str, Placement], dict[str, Placement], bool]] = {
    "(R,R) -> (S0,R) elsewhere": ({}, {"a": Shard(0)}, True),
    "(S0,R) -> (R,S0)": ({"a": Shard(0)}, {"b": Shard(0)}, False),
    "(S0,S0) -> (S0,S0), the other order": ({}, {}, False),
    "(S0,R) -> (S0,R) elsewhere": ({"a": Shard(0)}, {"a": Shard(0)}, True),
}


def large(n: int) -> Iterator[tuple[str, float, float, int]]:
    """Yield name, ms to plan, ms for one rank's part, and its messages, on n ranks.

    Each time is the least of several: thousands of ranks fill the caches of a busy processor.
    """
    one = DeviceMesh.of((n // 8, 8), range(n), ("a", "b"))
    other = DeviceMesh.of((n // 8, 8), range(n, 2 * n), ("a", "b"))
    shape = (16384, 16384)
    for name, (before, after, is_elsewhere) in _LARGE.items():
        source, goal = Layout(one, before), Layout(other if is_elsewhere else one, after)
        if not before and not after:
            both: dict[str, Placement] = {"a": Shard(0), "b": Shard(0)}
            source, goal = Layout(one, both), Layout(one, both, {0: ("b", "a")})
        planning, path = _least_ms(partial(planned, source, goal, shape))
        rank, comms = one.ranks[n // 2 + 1], posts(path, shape)
        elapsed, parts = _least_ms(lambda comms=comms, rank=rank: [c.part(rank) for c in comms])
        yield name, planning, elapsed, sum(len(p.sends) + len(p.recvs) for p in parts)


def _least_ms(run: Callable[[], _T]) -> tuple[float, _T]:
    """Return the least ms of several runs, of which none finds what the ones before found."""
    times = []
    for _ in range(5):
        communication._known_part.cache_clear()
        communication._known_exchanging.cache_clear()
        start = time.process_time_ns()
        result_of_run = run()
        times.append(time.process_time_ns() - start)
    return min(times) / 1e6, result_of_run


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    return table


def _shown(measured: list[Row]) -> Table:
    table = _table(
        "bytes at the worst rank over the bound",
        *(
            "pairs",
            "n",
            "mean",
            "whole",
            "p90",
            "max",
            "total",
            "reachable",
            "owners",
            "DTensor",
            "more",
        ),
        *("messages", "ms", "p99", "busiest sender"),
    )
    for r in measured:
        table.add_row(
            r.title,
            str(r.pairs),
            *(f"{x:.3f}" for x in (r.mean, r.whole, r.ninetieth, r.most, r.total)),
            "" if r.reachable is None else f"{r.reachable:.3f}",
            "" if r.owners is None else f"{r.owners:.3f}",
            "" if r.dtensor is None else f"{r.dtensor:.3f}",
            "" if r.dtensor is None else str(r.more_than_dtensor),
            *(f"{x:.2f}" for x in (r.messages, r.median_ms, r.slow_ms, r.spread)),
        )
    return table


def _between_hosts(measured: list[Timed]) -> Table:
    table = _table(
        "from mesh to mesh, hosts known: what crosses hosts, and the time, over their bounds",
        *("AlpaComm's case", "MB between hosts", "over", "ms", "over", "hosts not known", "steps"),
    )
    for t in measured:
        table.add_row(
            t.case,
            f"{t.crossing / 1e6:.0f}",
            f"{t.crossing / t.least_crossing:.3f}",
            f"{t.microseconds / 1e3:.1f}",
            f"{t.ratio:.3f}",
            f"{t.without_hosts / t.least_microseconds:.3f}",
            t.steps,
        )
    ratios = [t.ratio for t in measured], [t.without_hosts / t.least_microseconds for t in measured]
    known, unknown = (f"{statistics.geometric_mean(r):.3f}" for r in ratios)
    table.add_row("geometric mean", "", "", "", known, unknown, "")
    return table


def main() -> None:
    """Print the tables and store them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one mesh and shape, to see it run")
    parser.add_argument(
        "--jobs", type=int, default=1, help="in how many processes pairs are planned"
    )
    parser.add_argument("--output", type=Path, default=_RESULTS, help="where the JSON goes")
    arguments = parser.parse_args()
    console = screen.output()
    if not console.is_terminal:
        console.width = 170
    with running(arguments.jobs) as run:
        all_rows = list(rows(arguments.quick, run))
        drawn = plannings(*(((8, 64), 6) if arguments.quick else (RANKS, 40)), run)
    console.print(_shown(all_rows))
    for r in all_rows:
        console.print(f"worst of {r.title}:", highlight=False)
        for ratio, pair, how in r.worst:
            console.print(f"  {ratio:.3f} {pair}: {how}", highlight=False, markup=False)
    sizes = (64,) if arguments.quick else (64, 1024, 8192)
    scale = [(n, *one) for n in sizes for one in large(n)]
    table = _table("large meshes", "change", "ranks", "plan, ms", "one rank's part, ms", "messages")
    for n, name, planning, part, messages in scale:
        table.add_row(name, str(n), f"{planning:.2f}", f"{part:.2f}", str(messages))
    console.print(table)
    table = _table("planning drawn changes on meshes of three axes", "change", "n", "ms", "p99")
    for p in drawn:
        table.add_row(p.name, str(p.pairs), f"{p.median_ms:.2f}", f"{p.slow_ms:.2f}")
    console.print(table)
    hosts = [timed(case) for case in CASES]
    console.print(_between_hosts(hosts))
    stored = {
        "benchmark": "reshard",
        "versions": {"torch": torch.__version__},
        "rows": [asdict(r) for r in all_rows],
        "large": scale,
        "planning": [asdict(p) for p in drawn],
        "hosts": [asdict(t) for t in hosts],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
