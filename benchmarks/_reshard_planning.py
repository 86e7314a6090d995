"""The time to plan drawn changes on meshes of three axes, of up to thousands of ranks.

Processor time of the first plan of each change; other changes on the same meshes came before it.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

from _reshard_looks import Run

from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement
from mdfuse.reshard.steps import _known_steps
from mdfuse.reshard.steps import _steps as planned

RANKS = tuple(2**k for k in range(3, 14))

_SHAPES = ((4096, 4096), (4099, 2053), (13, 9))
_ON_HOST = 8


@dataclass(frozen=True)
class Planning:
    """The times of plans of some changes."""

    name: str
    pairs: int
    median_ms: float
    slow_ms: float


def plannings(ranks: tuple[int, ...], pairs: int, run: Run | None = None) -> list[Planning]:
    """Return a row for changes on one mesh, and to as many other ranks; without hosts and with."""
    tasks = [_Drawn(h, o, ranks, pairs) for h in (False, True) for o in (True, False)]
    return run("drawn changes", _row, tasks) if run is not None else [*map(_row, tasks)]


class _Drawn(NamedTuple):
    """Changes that are drawn."""

    has_hosts: bool
    is_one: bool
    ranks: tuple[int, ...]
    pairs: int


def _row(drawn: _Drawn) -> Planning:
    draw, times = random.Random(0), list[float]()
    for n in drawn.ranks:
        one, other = (_mesh(draw, first, n, drawn.has_hosts) for first in (0, n))
        for _ in range(drawn.pairs):
            times.append(_planned(draw, one, one if drawn.is_one else other))
    where = "on one mesh" if drawn.is_one else "to other ranks"
    known = f"{_ON_HOST} ranks to a host" if drawn.has_hosts else "hosts not known"
    times.sort()
    slow = times[len(times) * 99 // 100]
    return Planning(f"{where}, {known}", len(times), statistics.median(times), slow)


def _mesh(draw: random.Random, first: int, n: int, has_hosts: bool) -> DeviceMesh:
    sizes = [1, 1, 1]
    for _ in range(n.bit_length() - 1):
        sizes[draw.randrange(3)] *= 2
    ranks = range(first, first + n)
    hosts = [r // _ON_HOST for r in ranks] if has_hosts else None
    return DeviceMesh.of((sizes[0], sizes[1], sizes[2]), ranks, ("a", "b", "c"), hosts)


def _planned(draw: random.Random, one: DeviceMesh, other: DeviceMesh) -> float:
    """Plan a drawn change; return the milliseconds that it took."""
    source, goal = _layout(draw, one, Partial()), _layout(draw, other)
    shape = draw.choice(_SHAPES)
    _known_steps.cache_clear()
    start = time.process_time_ns()
    planned(source, goal, shape)
    return (time.process_time_ns() - start) / 1e6


def _layout(draw: random.Random, mesh: DeviceMesh, *others: Placement) -> Layout:
    kinds = [Replicate(), Shard(0), Shard(1), *others]
    placements = {a: draw.choice(kinds) for a in mesh.axes}
    order = dict[int, list[str]]()
    for axis in draw.sample(mesh.axes, len(mesh.axes)):
        placement = placements[axis]
        if isinstance(placement, Shard):
            order.setdefault(placement.dim, []).append(axis)
    return Layout(mesh, placements, order)
