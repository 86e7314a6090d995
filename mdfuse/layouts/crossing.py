"""What an exchange takes from host to host, and how many messages, at the busiest."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mdfuse.layouts.aligned import Aligned, Alone
from mdfuse.layouts.dim_rows import dims_of
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.hosts import digits, hosts_by_rank
from mdfuse.layouts.lacks import (
    cut,
    every_coordinate,
    meeting,
    part_sizes,
    place_of,
    rows_at,
    shared,
)
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.side import Side
from mdfuse.mesh import DeviceMesh


class _Held(NamedTuple):
    """What is held where: arrays with an entry for each part of the source on each host."""

    host: Any
    #: coordinates along the axes that tell parts and terms apart
    at: dict[str, Any]
    #: the ranks of the host that hold it
    holders: Any
    #: a number for each part and term
    key: Any
    #: the first of these ranks, in row-major order
    first: Any


def crossing(exchange: Exchange) -> int:
    """Return the elements through the host that takes in or gives out most; extents are numbers.

    Each holder of what several hosts have is taken to send as much of it to other hosts.

    >>> from mdfuse.layouts.layout import Layout, Replicate, Shard
    >>> from mdfuse.mesh import DeviceMesh
    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> rows, columns = (Side(Layout(mesh, {"a": Shard(d)}), (4, 4)) for d in (0, 1))
    >>> crossing(Exchange(rows, columns))
    8
    """
    return seen(exchange).crossing()


def messages(exchange: Exchange) -> int:
    """Return how many messages a rank sends or receives at most."""
    return seen(exchange).messages()


def seen(exchange: Exchange) -> Aligned | ByRank:
    """Return what tells of an exchange the above: digits of axes, or else all ranks."""
    return _aligned(exchange) or ByRank(exchange)


class ByRank(NamedTuple):
    """An exchange of which all ranks are looked at."""

    exchange: Exchange

    def crossing(self) -> int:
        """Return the elements through the host that takes in or gives out most."""
        exchange = self.exchange
        source, destination = exchange.source, exchange.destination
        terms = source.count(exchange.reduced)
        apart = crossing_apart(source.layout, destination.layout, source.shape, terms)
        if apart is not None:
            return apart
        hosts = hosts_by_rank(source.mesh, destination.mesh)
        fixed = tuple(a for a in source.mesh.axes if a in source.fixed)
        held, receivers = _held(source.mesh, fixed), destination.mesh.array
        lack = part_sizes(destination.layout, destination.shape) * source.count(exchange.reduced)
        far = part_sizes(source.layout, source.shape)[held.first] * destination.count(
            destination.free
        )  # all receivers
        if not are_apart(source.mesh, destination.mesh):  # less those served near
            near = _near(source.mesh, fixed, destination.mesh)
            overlap = _overlap(exchange, held, near, every_coordinate(destination.mesh))
            lack = lack - overlap.sum(1)
            local = np.bincount(near[0].reshape(-1), overlap.reshape(-1), len(held.key))
            far = far - np.bincount(held.key, local)[held.key]
        into = np.bincount(hosts[receivers], lack)
        share = -(-far * held.holders // np.bincount(held.key, held.holders)[held.key].astype(int))
        out = np.bincount(held.host, share)
        return int(max(into.max(), out.max()))

    def messages(self) -> int:
        """Return how many messages a rank sends or receives at most."""
        exchange = self.exchange
        source, destination = exchange.source, exchange.destination
        copies, turns = destination.count(destination.free), source.count(source.free)
        terms = source.count(exchange.reduced)
        if source.mesh != destination.mesh:
            sent, got = _most_met(source, destination), _most_met(destination, source)
            return max(-(-sent * copies // turns), got * terms)
        at = every_coordinate(source.mesh)
        both = (_shared(exchange, dim, at, at) for dim in range(len(source.shape)))
        has_own: Any = np.prod([np.zeros(source.mesh.size, int) + n for n in both], 0) > 0
        each = -(-_meeting(source, destination) * copies // turns) - has_own
        return int(max(np.max(each), np.max(_meeting(destination, source) * terms - has_own)))


def _aligned(exchange: Exchange) -> Aligned | None:
    """Return an exchange on one mesh whose hosts follow its axes; None: it is no such one."""
    source, destination = exchange.source, exchange.destination
    if source.mesh != destination.mesh or source.layout.reaches or destination.layout.reaches:
        return None
    axis_digits, index = digits(source.mesh), source.mesh.axes.index
    if axis_digits is None:
        return None
    have, need = (tuple(tuple(map(index, axes)) for axes in x.split) for x in (source, destination))
    terms, goal_terms = ([*map(index, x.layout.partial_axes)] for x in (source, destination))
    dims = dims_of(source.layout, destination.layout, source.shape, axis_digits.near)
    kept_axes = [index(a) for a, _ in exchange.kept]
    return Aligned(axis_digits, dims, have, need, terms, goal_terms, kept_axes)


def crossing_apart(
    source: Layout, destination: Layout, shape: tuple[int, ...], terms: int, is_least: bool = False
) -> int | None:
    """Return what crosses hosts in an exchange to other hosts, if both sides' follow their axes.

    Args:
        source: before.
        destination: afterwards.
        shape: global extents, numbers.
        terms: how many of each element come to each rank.
        is_least: quickly, and not too much.
    """
    if not are_apart(source.mesh, destination.mesh):
        return None
    sides = _alone(source, shape), _alone(destination, shape)
    if sides[0] is None or sides[1] is None:
        return None
    gives = sides[0].gives_at_least if is_least else sides[0].given
    return max(sides[1].received * terms, gives(sides[1].alike))


def least_gathering(split: Layout, whole: Layout, shape: tuple[int, ...]) -> int:
    """Return what a host takes in at least where a layout that is split further is gathered."""
    sides = _alone(split, shape), _alone(whole, shape)
    if sides[0] is None or sides[1] is None:
        return 0
    return sides[1].first_and_all[0] - sides[0].first_and_all[0]


def least_reducing(done: Layout, shape: tuple[int, ...], axes: tuple[str, ...], kept: int) -> int:
    """Return what a host takes in at least, on average, where terms along some axes are reduced.

    The first host that has the sum of terms on n hosts has got n - 1, and each other one that needs
    the sum gets one more.

    Args:
        done: what is known afterwards.
        shape: global extents, numbers.
        axes: along which there were terms.
        kept: how many terms stay apart.
    """
    hosts, alone = hosts_of_terms(done.mesh, axes), _alone(done, shape)
    if hosts == 1 or alone is None:
        return 0
    total = alone.first_and_all[1] + (hosts - 2) * math.prod(shape) * kept
    return total // math.prod(alone.digits.far)


@lru_cache(maxsize=1024)
def _alone(layout: Layout, shape: tuple[int, ...]) -> Alone | None:
    """Return what the hosts of a mesh have, if they follow its axes."""
    axis_digits, index = digits(layout.mesh), layout.mesh.axes.index
    if axis_digits is None or layout.reaches:
        return None
    dims = dims_of(layout, layout, shape, axis_digits.near)
    splits = tuple([tuple(map(index, layout.split_axes(d))) for d in range(len(shape))])
    return Alone(axis_digits, dims, splits, [*map(index, layout.partial_axes)])


def elements_by_host(side: Side) -> list[int]:
    """Return how many elements each host has, copies on one host counted once.

    >>> from mdfuse.layouts.layout import Layout
    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> elements_by_host(Side(Layout(mesh), (4, 4)))
    [16, 16]
    """
    held = _held(side.mesh, tuple(a for a in side.mesh.axes if a in side.fixed))
    sizes = part_sizes(side.layout, side.shape)[held.first]
    elements = np.bincount(held.host, sizes).astype(int)
    return [*map(int, elements[_each_host(side.mesh)])]


def first_and_all(side: Side) -> tuple[int, int]:
    """Return the elements that the host of the first rank has, and those of all, as above.

    >>> from mdfuse.layouts.layout import Layout
    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> first_and_all(Side(Layout(mesh), (4, 4)))
    (16, 32)
    """
    alone = _alone(side.layout, side.shape)
    if alone is not None:
        return alone.first_and_all
    elements, first = elements_by_host(side), (side.mesh.hosts or ())[0]
    return elements[int(np.searchsorted(_each_host(side.mesh), first))], sum(elements)


def hosts_of_terms(mesh: DeviceMesh, axes: tuple[str, ...]) -> int:
    """Return on how many hosts the terms along some axes are at least.

    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> hosts_of_terms(mesh, ("a",)), hosts_of_terms(mesh, ("b",)), hosts_of_terms(mesh, ("a", "b"))
    (2, 1, 2)
    """
    return -(-math.prod(map(mesh.axis_size, axes)) // parts_on_host(mesh, axes))


@lru_cache(maxsize=256)
def parts_on_host(mesh: DeviceMesh, axes: tuple[str, ...]) -> int:
    """Return how many different parts ranks of one host have, at most, of what some axes split.

    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> parts_on_host(mesh, ("a",)), parts_on_host(mesh, ("b",))
    (1, 2)
    """
    axis_digits = digits(mesh)
    if axis_digits is not None:
        return axis_digits.ranks([*map(mesh.axis_index, axes)])
    return int(np.bincount(_held(mesh, axes).host).max())


@lru_cache(maxsize=256)
def _each_host(mesh: DeviceMesh) -> Any:
    return np.unique(np.array(mesh.hosts))


@lru_cache(maxsize=256)
def _held(mesh: DeviceMesh, fixed: tuple[str, ...]) -> _Held:
    """Return which parts and terms each host of a mesh holds; these axes tell them apart."""
    at = every_coordinate(mesh)
    number = np.zeros(mesh.size, int)
    for a in fixed:
        number = number * mesh.axis_size(a) + at[a]
    n = math.prod(map(mesh.axis_size, fixed))
    pairs = np.array(mesh.hosts) * n + number
    entries, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    return _Held(entries // n, {a: at[a][first] for a in fixed}, counts, entries % n, first)


@lru_cache(maxsize=256)
def are_apart(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Return whether no host has ranks of both."""
    return {*(mesh.hosts or ())}.isdisjoint(other.hosts or ())


@lru_cache(maxsize=256)
def _near(mesh: DeviceMesh, fixed: tuple[str, ...], destination: DeviceMesh) -> tuple[Any, Any]:
    """Return the entries of `_held` on each receiver's host, and which of them there are."""
    hosts = np.array(destination.hosts)
    begin, end = (np.searchsorted(_held(mesh, fixed).host, hosts, x) for x in ("left", "right"))
    near = begin[:, None] + np.arange(max(int((end - begin).max()), 1))
    last = len(_held(mesh, fixed).key) - 1
    return np.minimum(near, last), (near < end[:, None]).astype(int)


def _overlap(exchange: Exchange, held: _Held, near: tuple[Any, Any], need: dict[str, Any]) -> Any:
    """Return how much the receivers at some coordinates need of each part on their hosts."""
    source, destination = exchange.source, exchange.destination
    entries, overlap = near
    for a, b in exchange.kept:
        overlap = overlap * (held.at[a][entries] == need[b][:, None])
    for dim, extent in enumerate(source.shape):
        have = [
            (first[entries] if np.ndim(first) else first, last[entries] if np.ndim(last) else last)
            for first, last in rows_at(source.layout, dim, extent, held.at)
        ]
        wanted = [
            (start[:, None] if np.ndim(start) else start, stop[:, None] if np.ndim(stop) else stop)
            for start, stop in rows_at(destination.layout, dim, extent, need)
        ]
        overlap = overlap * shared(wanted, have)
    return overlap


def _shared(exchange: Exchange, dim: int, have: dict[str, Any], need: dict[str, Any]) -> Any:
    """Return how many rows of a dim are both in parts of the source and of the destination."""
    extent = exchange.source.shape[dim]
    held = rows_at(exchange.source.layout, dim, extent, have)
    return shared(rows_at(exchange.destination.layout, dim, extent, need), held)


def _most_met(side: Side, other: Side) -> int:
    """Return how many parts of the other side a part of this one meets at most."""
    a, b = side.layout, other.layout
    if a.blocked or b.blocked or a.reaches or b.reaches:
        return int(np.max(_meeting(side, other)))
    # each dim is split by axes of its own, so that some rank has the most of all dims
    dims = zip(side.split_sizes, other.split_sizes, side.shape, strict=True)
    return math.prod([_met(*dim) for dim in dims])


@lru_cache(maxsize=1024)
def _met(sizes: tuple[int, ...], others: tuple[int, ...], extent: int) -> int:
    """Return how many parts of a dim, split by the others, one meets at most that these split."""
    n, m = math.prod(sizes), math.prod(others)
    if extent and extent % n == 0 and extent % m == 0 and max(n, m) % min(n, m) == 0:
        return max(m // n, 1)  # equal parts, of which some lie in the others
    at = np.unravel_index(np.arange(math.prod(sizes)), sizes) if sizes else ()
    ((start, stop),) = cut(((0, extent),), [(n, i, True) for n, i in zip(sizes, at, strict=True)])
    first, last = (place_of(others, extent, row) for row in (start, stop - 1))
    return int(np.max(np.where(stop > start, last - first + 1, 0)))


def _meeting(side: Side, other: Side) -> Any:
    """Return how many parts of the other side each part of this one meets."""
    at, counts = every_coordinate(side.mesh), np.zeros(side.mesh.size, int) + 1
    for dim, extent in enumerate(side.shape):
        _, parts = meeting(side.layout, other.layout, dim, extent, at)
        counts = counts * parts
    return counts
