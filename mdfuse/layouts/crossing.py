"""What an exchange takes from host to host, and how many messages, at the busiest."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mdfuse.layouts.aligned import Aligned, digits
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.hosts import hosts_by_rank
from mdfuse.layouts.lacks import every_coordinate, length, meeting, rows_at, shared
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
    aligned = _aligned(exchange)
    if aligned is not None:
        return aligned.crossing()
    source, destination = exchange.source, exchange.destination
    hosts = hosts_by_rank(source.mesh, destination.mesh)
    fixed = tuple(a for a in source.mesh.axes if a in source.fixed)
    held, receivers = _held(source.mesh, fixed), destination.mesh.array
    near = _near(source.mesh, fixed, destination.mesh, None)
    overlap = _overlap(exchange, held, near, every_coordinate(destination.mesh))
    lack = _sizes(destination, every_coordinate(destination.mesh)) * source.count(exchange.reduced)
    lack = lack - overlap.sum(1)
    into = np.bincount(hosts[receivers], lack)
    local = np.bincount(near[0].reshape(-1), overlap.reshape(-1), len(held.key))
    wanted = _sizes(source, held.at) * destination.count(destination.free)
    far = wanted - np.bincount(held.key, local)[held.key]  # all receivers, less those served near
    share = -(-far * held.holders // np.bincount(held.key, held.holders)[held.key].astype(int))
    out = np.bincount(held.host, share)
    return int(max(into.max(), out.max()))


def least_crossing(exchange: Exchange) -> int:
    """Return the elements that ranks of a host need and it lacks, at most: each comes in once.

    >>> from mdfuse.layouts.layout import Layout, Shard
    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> rows, whole = (Side(Layout(mesh, at), (4, 4)) for at in ({"a": Shard(0)}, {}))
    >>> least_crossing(Exchange(rows, whole))
    8
    """
    aligned = _aligned(exchange)
    if aligned is not None:
        return aligned.least_crossing()
    source, destination = exchange.source, exchange.destination
    fixed, needed = (tuple(a for a in x.mesh.axes if a in x.fixed) for x in (source, destination))
    held, need = _held(source.mesh, fixed), _held(destination.mesh, needed)
    near = _near(source.mesh, fixed, destination.mesh, needed)
    lack = _sizes(destination, need.at) - _overlap(exchange, held, near, need.at).sum(1)
    return int(np.bincount(need.host, lack).max())


def _aligned(exchange: Exchange) -> Aligned | None:
    """Return an exchange on one mesh whose hosts follow its axes; None: it is no such one."""
    source, destination = exchange.source, exchange.destination
    if source.mesh != destination.mesh or source.layout.reaches or destination.layout.reaches:
        return None
    found = digits(source.mesh)
    return Aligned(exchange, found) if found is not None else None


def elements_by_host(side: Side) -> list[int]:
    """Return how many elements each host has, copies on one host counted once.

    >>> from mdfuse.layouts.layout import Layout
    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> elements_by_host(Side(Layout(mesh), (4, 4)))
    [16, 16]
    """
    held = _held(side.mesh, tuple(a for a in side.mesh.axes if a in side.fixed))
    sizes = np.broadcast_to(_sizes(side, held.at), held.host.shape)
    found = np.bincount(held.host, sizes).astype(int)
    return [*map(int, found[_each_host(side.mesh)])]


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
    found, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    return _Held(found // n, {a: at[a][first] for a in fixed}, counts, found % n)


@lru_cache(maxsize=256)
def _near(
    mesh: DeviceMesh,
    fixed: tuple[str, ...],
    destination: DeviceMesh,
    needed: tuple[str, ...] | None,
) -> tuple[Any, Any]:
    """Return the entries of `_held` on each receiver's host, and which of them there are.

    Receivers are the ranks of the destination, or what these axes tell apart on each host.
    """
    hosts = np.array(destination.hosts) if needed is None else _held(destination, needed).host
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


def _sizes(side: Side, at: dict[str, Any]) -> Any:
    """Return how many elements the parts at some coordinates have."""
    size: Any = np.ones(len(next(iter(at.values()), [0])), int)
    for dim, extent in enumerate(side.shape):
        size = size * length(rows_at(side.layout, dim, extent, at))
    return size


def messages(exchange: Exchange) -> int:
    """Return how many messages a rank sends or receives at most."""
    aligned = _aligned(exchange)
    if aligned is not None:
        return aligned.messages()
    source, destination = exchange.source, exchange.destination
    own: Any = 0
    if source.mesh == destination.mesh:
        at = every_coordinate(source.mesh)
        both = (_shared(exchange, dim, at, at) for dim in range(len(source.shape)))
        own = np.prod([np.zeros(source.mesh.size, int) + n for n in both], 0) > 0
    copies, turns = destination.count(destination.free), source.count(source.free)
    sent = -(-_meeting(source, destination) * copies // turns) - own
    got = _meeting(destination, source) * source.count(exchange.reduced) - own
    return int(max(np.max(sent), np.max(got)))


def _shared(exchange: Exchange, dim: int, have: dict[str, Any], need: dict[str, Any]) -> Any:
    """Return how many rows of a dim are both in parts of the source and of the destination."""
    extent = exchange.source.shape[dim]
    held = rows_at(exchange.source.layout, dim, extent, have)
    return shared(rows_at(exchange.destination.layout, dim, extent, need), held)


def _meeting(side: Side, other: Side) -> Any:
    """Return how many parts of the other side each part of this one meets."""
    at, found = every_coordinate(side.mesh), np.zeros(side.mesh.size, int) + 1
    for dim, extent in enumerate(side.shape):
        _, parts = meeting(side.layout, other.layout, dim, extent, at)
        found = found * parts
    return found
