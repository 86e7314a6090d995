"""Inter-host volume of an exchange at the busiest host, and message count of the busiest rank."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mdfuse.layouts.dim_parts import Parts, shared
from mdfuse.layouts.endpoints import Side
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.hosts import hosts_by_rank
from mdfuse.layouts.recv_volume import every_coordinate, part_sizes, rows_at
from mdfuse.mesh import DeviceMesh


class _Holders(NamedTuple):
    """Holders by host: arrays with one entry per source part and host."""

    host: Any
    #: axis that tells parts and terms apart -> coordinates
    at: dict[str, Any]
    #: number of ranks of the host that hold the part
    holders: Any
    #: a number for each part and term
    key: Any
    #: the first of these ranks, in row-major order
    first: Any


def crossing(exchange: Exchange) -> int:
    """Return the inter-host volume of the busiest host, in elements; extents are numbers.

    The model divides the sends of a part evenly among its holders on all hosts.

    >>> from mdfuse.layouts.layout import Layout, Replicate, Shard
    >>> from mdfuse.mesh import DeviceMesh
    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> rows, columns = (Side(Layout(mesh, {"a": Shard(d)}), (4, 4)) for d in (0, 1))
    >>> crossing(Exchange(rows, columns))
    8
    """
    source, destination = exchange.source, exchange.destination
    hosts = hosts_by_rank(source.mesh, destination.mesh)
    fixed = tuple(a for a in source.mesh.axes if a in source.fixed)
    held, receivers = _held(source.mesh, fixed), destination.mesh.array
    lack = part_sizes(destination.layout, destination.shape) * source.count(exchange.reduced)
    far = part_sizes(source.layout, source.shape)[held.first] * destination.count(
        destination.free
    )  # all receivers
    if not are_apart(source.mesh, destination.mesh):  # subtract local copies
        near = _near(source.mesh, fixed, destination.mesh)
        overlap = _overlap(exchange, held, near, every_coordinate(destination.mesh))
        lack = lack - overlap.sum(1)
        local = np.bincount(near[0].reshape(-1), overlap.reshape(-1), len(held.key))
        far = far - np.bincount(held.key, local)[held.key]
    into = np.bincount(hosts[receivers], lack)
    share = -(-far * held.holders // np.bincount(held.key, held.holders)[held.key].astype(int))
    out = np.bincount(held.host, share)
    return int(max(into.max(), out.max()))


def messages(exchange: Exchange) -> int:
    """Return the message count of the busiest rank."""
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


@lru_cache(maxsize=256)
def _held(mesh: DeviceMesh, fixed: tuple[str, ...]) -> _Holders:
    """Return the parts and terms on each host of a mesh; `fixed` axes tell them apart."""
    at = every_coordinate(mesh)
    number = np.zeros(mesh.size, int)
    for a in fixed:
        number = number * mesh.axis_size(a) + at[a]
    n = math.prod(map(mesh.axis_size, fixed))
    pairs = np.array(mesh.hosts) * n + number
    entries, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    return _Holders(entries // n, {a: at[a][first] for a in fixed}, counts, entries % n, first)


@lru_cache(maxsize=256)
def are_apart(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Return whether no host has ranks of both meshes."""
    return {*(mesh.hosts or ())}.isdisjoint(other.hosts or ())


@lru_cache(maxsize=256)
def _near(mesh: DeviceMesh, fixed: tuple[str, ...], destination: DeviceMesh) -> tuple[Any, Any]:
    """Return the entries of `_held` on each receiver's host, and a mask of those that exist."""
    hosts = np.array(destination.hosts)
    begin, end = (np.searchsorted(_held(mesh, fixed).host, hosts, x) for x in ("left", "right"))
    near = begin[:, None] + np.arange(max(int((end - begin).max()), 1))
    last = len(_held(mesh, fixed).key) - 1
    return np.minimum(near, last), (near < end[:, None]).astype(int)


def _overlap(
    exchange: Exchange, held: _Holders, near: tuple[Any, Any], need: dict[str, Any]
) -> Any:
    """Return the elements that each receiver needs of each part on its host."""
    entries, overlap = near
    for a, b in exchange.staying:
        overlap = overlap * (held.at[a][entries] == need[b][:, None])
    have = {a: i[entries] for a, i in held.at.items()}
    wanted = {a: i[:, None] for a, i in need.items()}
    for dim in range(len(exchange.source.shape)):
        overlap = overlap * _shared(exchange, dim, have, wanted)
    return overlap


def _shared(exchange: Exchange, dim: int, have: dict[str, Any], need: dict[str, Any]) -> Any:
    """Return the number of rows of a dim that source part and destination part share."""
    extent = exchange.source.shape[dim]
    held = rows_at(exchange.source.layout, dim, extent, have)
    return shared(rows_at(exchange.destination.layout, dim, extent, need), held)


def _most_met(side: Side, other: Side) -> int:
    """Return the largest number of the other side's parts that one part of this side overlaps."""
    a, b = side.layout, other.layout
    if a.blocked or b.blocked or a.reaches or b.reaches:
        return int(np.max(_meeting(side, other)))
    # each axis splits one dim, so that some rank has the maximum in every dim
    dims = zip(side.parts, other.parts, strict=True)
    return math.prod([_met(one.extent, one.sizes, another.sizes) for one, another in dims])


@lru_cache(maxsize=1024)
def _met(extent: int, sizes: tuple[int, ...], other_sizes: tuple[int, ...]) -> int:
    """Return the largest number of parts of the other sizes that one part overlaps."""
    parts, others = (Parts(extent, x, (True,) * len(x)) for x in (sizes, other_sizes))
    n, m = parts.count, others.count
    if parts.equal and others.equal and max(n, m) % min(n, m) == 0:
        return max(m // n, 1)  # equal parts: one side's parts nest in the other's
    at = np.unravel_index(np.arange(n), parts.sizes) if parts.sizes else ()
    return int(np.max(others.met(parts.at(at))[1]))


def _meeting(side: Side, other: Side) -> Any:
    """Return the number of the other side's parts that each part of this side overlaps."""
    at, counts = every_coordinate(side.mesh), np.zeros(side.mesh.size, int) + 1
    for dim, extent in enumerate(side.shape):
        counts = counts * other.parts[dim].met(rows_at(side.layout, dim, extent, at))[1]
    return counts
