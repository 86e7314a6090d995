"""Drawn changes on hosts: few numbers say what a look at all ranks and all ways says."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product

import pytest
from layouts.test_exchange import held

from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.endpoints import Side
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.inter_host_volume import crossing
from mdfuse.layouts.layout import Placement
from mdfuse.reshard import Step, across

planner = sys.modules["mdfuse.reshard.steps"]
Shape = tuple[int, int]
#: a rank's elements, each with the coordinates of the term
Held = set[tuple[tuple[int, ...], int]]


def drawn_mesh(draw: random.Random, first: int = 0) -> DeviceMesh:
    """Three axes; as many ranks on each host, in the order of the mesh."""
    shape = draw.choice(((2, 2, 2), (2, 2, 4), (4, 1, 2), (2, 3, 2), (2, 4, 4), (3, 4, 2)))
    n = shape[0] * shape[1] * shape[2]
    on_host = draw.choice([m for m in (1, 2, 4, 8) if n % m == 0])
    where = [(first + i) // on_host for i in range(n)]
    return DeviceMesh.of(shape, range(first, first + n), ("a", "b", "c"), where)


def drawn_layout(draw: random.Random, mesh: DeviceMesh, *more: Placement) -> Layout:
    kinds = [Replicate(), Shard(0), Shard(1), *more]
    placements = {a: draw.choice(kinds) for a in mesh.axes}
    order = dict[int, list[str]]()
    for axis in draw.sample(mesh.axes, 3):
        placement = placements[axis]
        if isinstance(placement, Shard):
            order.setdefault(placement.dim, []).append(axis)
    return Layout(mesh, placements, order)


def drawn(seed: int, shapes: tuple[Shape, ...]) -> tuple[Layout, Layout, Shape]:
    """A change on one mesh, or to ranks on other hosts, or to some of the same ranks."""
    draw = random.Random(seed)
    one = drawn_mesh(draw)
    other = one if seed % 3 == 0 else drawn_mesh(draw, 32 if seed % 3 == 1 else 2)
    if seed % 3 == 2:
        where = [r // 2 for r in range(40)]
        one, other = (m.with_hosts([where[r] for r in m.ranks]) for m in (one, other))
    source = drawn_layout(draw, one, Partial())
    stays = [Partial()] if one == other and draw.random() < 0.5 else []
    goal = drawn_layout(draw, other, *stays)
    if not {*goal.partial_axes} <= {*source.partial_axes}:
        goal = drawn_layout(draw, other)
    return source, goal, draw.choice(shapes)


def terms(layout: Layout, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    at = dict(zip(layout.mesh.axes, layout.mesh.coordinate(rank) or (), strict=True))
    return tuple(at[a] for a in axes)


def counted(source: Layout, goal: Layout, shape: Shape) -> int:
    """What crosses hosts in an exchange at the busiest: rank by rank."""
    host = {r: h for m in (source.mesh, goal.mesh) for r, h in zip(m, m.hosts or (), strict=True)}
    axes = source.partial_axes
    stays = [a in goal.partial_axes and source.mesh == goal.mesh for a in axes]
    sizes = [range(source.mesh.axis_size(a)) for a in axes]
    has: dict[int, Held] = {
        r: {(terms(source, axes, r), e) for e in held(source, shape, r)} for r in source.mesh
    }
    needs = dict[int, Held]()
    for r in goal.mesh:
        own = terms(source, axes, r) if any(stays) else ()
        choices = [[own[i]] if is_kept else sizes[i] for i, is_kept in enumerate(stays)]
        needs[r] = {(term, e) for term in product(*choices) for e in held(goal, shape, r)}
    here = {h: set[tuple[tuple[int, ...], int]]() for h in host.values()}
    for r, found in has.items():
        here[host[r]] |= found
    into, out = Counter[int](), Counter[int]()
    for h, found in here.items():
        on_host = [needs[r] for r in goal.mesh if host[r] == h]
        into[h] = sum(len(need - found) for need in on_host)
    split = {a for _, of in source.splits for a in of} | {*axes}
    fixed = tuple(a for a in source.mesh.axes if a in split)
    for part in {terms(source, fixed, r) for r in source.mesh}:
        members = [r for r in source.mesh if terms(source, fixed, r) == part]
        near, mine = {host[r] for r in members}, has[members[0]]
        far = sum(len(need & mine) for r, need in needs.items() if host[r] not in near)
        for h in near:
            mates = sum(host[r] == h for r in members)
            out[h] += -(-far * mates // len(members))
    return max(*into.values(), *out.values())


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_what_crosses_hosts(first: int) -> None:
    for seed in range(first, first + 40):
        source, goal, shape = drawn(seed, ((12, 8), (13, 9), (5, 16), (16, 16)))
        exchange = Exchange(Side(source, shape), Side(goal, shape))
        most = counted(source, goal, shape)
        where = (seed, source.mesh, source, goal.mesh, goal, shape)
        assert crossing(exchange) == most, where


def forget() -> None:
    for known in (planner._known_steps, planner._first_search):
        known.cache_clear()
    for known in (across._finer, across._known_time):
        known.cache_clear()


def chosen(seed: int, hosts_known: bool = True) -> tuple[Step, ...]:
    forget()
    source, goal, shape = drawn(seed, ((4096, 4096), (4099, 2053), (13, 9), (64, 48)))
    if not hosts_known:
        source, goal = (
            Layout(x.mesh.with_hosts(None), x.by_axis(), x.order) for x in (source, goal)
        )
    found: tuple[Step, ...] = planner.steps(source, goal, shape)
    return found


def every_way(ways: Iterable[across._LegsPath], cost: Callable[[Step], int]) -> tuple[Step, ...]:
    """Return the cheapest of all ways, each followed to its end."""
    every = []
    for n, way in enumerate(ways):
        legs = [leg() for leg in way.legs]
        costs = [sum(map(cost, leg)) for leg in legs]
        total = max(costs) if way.is_apart else sum(costs)
        every.append(((total, sum(costs), sum(map(len, legs)), n), (*legs[0], *legs[1])))
    return min(every)[1]


@pytest.mark.parametrize("first", range(0, 90, 15))
@pytest.mark.parametrize("hosts_known", [True, False])
def test_no_way_to_other_ranks_costs_less(
    first: int, hosts_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = [seed for seed in range(first, first + 15) if seed % 3]
    wanted = {seed: chosen(seed, hosts_known) for seed in seeds}
    monkeypatch.setattr(across, "_soonest", every_way)
    for seed, want in wanted.items():
        assert chosen(seed, hosts_known) == want, seed
    forget()
