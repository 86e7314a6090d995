"""What an exchange takes from host to host, and how many messages, at the busiest."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mdfuse.layouts.exchange import Exchange, Side
from mdfuse.layouts.hosts import hosts_by_rank
from mdfuse.layouts.lacks import every_coordinate, length, meeting, rows_at, shared


class Crossing(NamedTuple):
    """What an exchange does where hosts are known, in elements.

    Attributes:
        busiest: through the host that takes in or gives out most.
        least: what some rank needs and its host lacks: no other steps bring less to a host.
        messages: that a rank sends or receives, at most.
    """

    busiest: int
    least: int
    messages: int


class _Held(NamedTuple):
    """What is held where: arrays with an entry for each part of the source on each host."""

    host: Any
    #: coordinates along the axes that tell parts and terms apart
    at: dict[str, Any]
    #: the ranks of the host that hold it
    holders: Any
    #: a number for each part and term
    key: Any


def crossing(exchange: Exchange) -> Crossing:
    """Return what goes from host to host; hosts are known, and extents are numbers.

    Each holder of what several hosts have is taken to send as much of it to other hosts.

    >>> from mdfuse.layouts.layout import Layout, Replicate, Shard
    >>> from mdfuse.mesh import DeviceMesh
    >>> mesh = DeviceMesh.arange(a=2, b=2).with_hosts([0, 0, 1, 1])
    >>> rows, columns = (Side(Layout(mesh, {"a": Shard(d)}), (4, 4)) for d in (0, 1))
    >>> crossing(Exchange(rows, columns))
    Crossing(busiest=8, least=4, messages=1)
    """
    source, destination = exchange.source, exchange.destination
    hosts = hosts_by_rank(source.mesh, destination.mesh)
    held = _held(source, hosts)
    receivers = np.array(destination.mesh.ranks)
    near, overlap = _near(exchange, held, hosts[receivers])
    lack = _sizes(destination, every_coordinate(destination.mesh)) * source.count(exchange.reduced)
    lack = lack - overlap.sum(1)
    into = np.bincount(hosts[receivers], lack)
    local = np.zeros(len(held.key), int)
    np.add.at(local, near, overlap)
    wanted = _sizes(source, held.at) * destination.count(destination.free)
    far = wanted - np.bincount(held.key, local)[held.key]  # all receivers, less those served near
    share = -(-far * held.holders // np.bincount(held.key, held.holders)[held.key].astype(int))
    out = np.bincount(held.host, share)
    return Crossing(int(max(into.max(), out.max())), int(lack.max()), _messages(exchange))


def _held(source: Side, hosts: Any) -> _Held:
    """Return which parts and terms each host holds."""
    at = every_coordinate(source.mesh)
    n = source.count(source.fixed)
    pairs = hosts[np.array(source.mesh.ranks)] * n + source.number(at, source.fixed)
    found, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    return _Held(found // n, {a: at[a][first] for a in source.fixed}, counts, found % n)


def _near(exchange: Exchange, held: _Held, hosts: Any) -> tuple[Any, Any]:
    """Return what each receiver needs of each part on its host: (which entry, elements)."""
    source, destination = exchange.source, exchange.destination
    begin, end = (np.searchsorted(held.host, hosts, side) for side in ("left", "right"))
    n = max(int((end - begin).max()), 1)
    near = begin[:, None] + np.arange(n)
    overlap: Any = (near < end[:, None]).astype(int)
    near = np.minimum(near, len(held.key) - 1)
    need = every_coordinate(destination.mesh)
    have = {a: c[near] for a, c in held.at.items()}
    for a, b in exchange.kept:
        overlap = overlap * (have[a] == need[b][:, None])
    needed = {a: c[:, None] for a, c in need.items()}
    for dim in range(len(source.shape)):
        overlap = overlap * _shared(exchange, dim, have, needed)
    return near, overlap


def _sizes(side: Side, at: dict[str, Any]) -> Any:
    """Return how many elements the parts at some coordinates have."""
    size: Any = np.ones(len(next(iter(at.values()), [0])), int)
    for dim, extent in enumerate(side.shape):
        size = size * length(rows_at(side.layout, dim, extent, at))
    return size


def _messages(exchange: Exchange) -> int:
    """Return how many messages a rank sends or receives at most."""
    source, destination = exchange.source, exchange.destination
    own: Any = 0
    if source.mesh == destination.mesh:
        at = every_coordinate(source.mesh)
        shared = (_shared(exchange, dim, at, at) for dim in range(len(source.shape)))
        own = np.prod([np.zeros(source.mesh.size, int) + n for n in shared], 0) > 0
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
        found = found * meeting(side.layout, other.layout, dim, extent, at)
    return found
