"""What an exchange takes from host to host where hosts follow the axes of its mesh.

Each axis is two digits there: one says on which host a rank is, the other which of its ranks it is.
As a layout splits one dim with an axis, at most, what the ranks of a host have is, dim by dim, what
they have along its own axes: so sums over ranks are products of sums over the digits of each dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mdfuse.caching import Cache
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.lacks import length, meeting, rows_at, shared
from mdfuse.layouts.side import Side
from mdfuse.mesh import DeviceMesh

_T = TypeVar("_T")


class _Digits(NamedTuple):
    """The digits of the axes of a mesh; arrays have an axis for each of them.

    Attributes:
        far: axis -> how many values the digit has that says which host.
        near: axis -> how many the other one has.
        sender: axis -> coordinates of holders.
        receiver: axis -> coordinates of who needs, on the same hosts.
        alone: axis -> coordinates of each rank.
    """

    far: dict[str, int]
    near: dict[str, int]
    sender: dict[str, Any]
    receiver: dict[str, Any]
    alone: dict[str, Any]


class _OnHosts(NamedTuple):
    """For each host, the rows of a dim that its ranks have and need, and both at once.

    Attributes:
        has: of all its parts of the source.
        needs: of all its parts of the destination.
        both: of all pairs of these.
    """

    has: Any
    needs: Any
    both: Any


class _OfRanks(NamedTuple):
    """For each rank, what a dim adds to its messages.

    Attributes:
        own: whether it has some of the rows that it needs.
        sent: how many parts of the destination its part meets.
        got: how many parts of the source that meets.
    """

    own: Any
    sent: Any
    got: Any


_ON_HOSTS: Cache[_OnHosts] = Cache(limit=1024)
_OF_RANKS: Cache[_OfRanks] = Cache(limit=512)


@lru_cache(maxsize=256)
def digits(mesh: DeviceMesh) -> _Digits | None:
    """Return the digits of a mesh whose hosts are known; None where its hosts do not follow axes.

    >>> found = digits(DeviceMesh.arange(a=4, b=2).with_hosts([0] * 4 + [1] * 4))
    >>> found.far, found.near
    ({'a': 2, 'b': 1}, {'a': 2, 'b': 2})
    >>> digits(DeviceMesh.arange(a=3).with_hosts([0, 1, 1]))
    """
    hosts = np.array(mesh.hosts).reshape(mesh.shape)
    far, near = dict[str, int](), dict[str, int]()
    for i, (axis, n) in enumerate(zip(mesh.axes, mesh.shape, strict=True)):
        rows = np.moveaxis(hosts, i, 0).reshape(n, -1)
        ends = np.flatnonzero((rows[1:] != rows[:-1]).any(1)) + 1
        near[axis] = math.gcd(n, *ends.tolist())
        far[axis] = n // near[axis]
    if math.prod(far.values()) != len(np.unique(hosts)):
        return None
    grid = np.ogrid[tuple(map(slice, (*far.values(), *near.values(), *near.values())))]
    axes = [*enumerate(mesh.axes)]
    k = len(axes)
    return _Digits(
        far,
        near,
        {a: grid[i] * near[a] + grid[2 * k + i] for i, a in axes},
        {a: grid[i] * near[a] + grid[k + i] for i, a in axes},
        dict(zip(mesh.axes, np.ogrid[tuple(map(slice, mesh.shape))], strict=True)),
    )


@dataclass(frozen=True)
class Aligned:
    """An exchange on a mesh whose hosts follow its axes."""

    exchange: Exchange
    digits: _Digits

    def crossing(self) -> int:
        """Return the elements through the host that takes in or gives out most."""
        source, destination = self.exchange.source, self.exchange.destination
        far, near, kept = self.digits.far, self.digits.near, self._kept
        split, terms = {*sum(destination.split, ())}, source.count(self.exchange.reduced)
        receivers = self._count(near, (a for a in near if a not in split))
        needs, both = (self._product(d.needs for d in self.dims), self._both())
        into = receivers * (terms * needs - self._count(near, self.exchange.reduced) * both)
        held = self._count(near, source.layout.partial_axes)
        wanted = destination.count(destination.free) * self._product(d.has for d in self.dims)
        served = self._count(near, (a for a in near if a not in split and a not in kept))
        served *= self._count(far, (a for a in source.free if a not in split))
        given = held * (wanted - served * self._both(source.free))
        out = -(-given // self._count(far, source.free))
        return max(int(np.max(into)), int(np.max(out)))

    def least_crossing(self) -> int:
        """Return the elements that ranks of a host need and it lacks, at most: each comes once."""
        near = self.digits.near
        needs = self._product(d.needs for d in self.dims)
        lack = needs - self._count(near, self.exchange.reduced) * self._both()
        return int(np.max(lack)) * self._count(near, self.exchange.destination.layout.partial_axes)

    def messages(self) -> int:
        """Return how many messages a rank sends or receives at most."""
        source, destination = self.exchange.source, self.exchange.destination
        dims = self._known(_OF_RANKS, _of_ranks)
        own = self._product(d.own for d in dims)
        copies, turns = destination.count(destination.free), source.count(source.free)
        sent = -(-self._product(d.sent for d in dims) * copies // turns) - own
        got = self._product(d.got for d in dims)
        got = got * source.count(self.exchange.reduced) - own
        return max(int(np.max(sent)), int(np.max(got)))

    @cached_property
    def dims(self) -> list[_OnHosts]:
        return self._known(_ON_HOSTS, _on_hosts)

    @cached_property
    def _kept(self) -> Collection[str]:
        return [a for a, _ in self.exchange.kept]

    def _count(self, sizes: dict[str, int], axes: Iterator[str] | Collection[str]) -> int:
        return math.prod(sizes[a] for a in axes)

    def _product(self, dims: Iterator[Any]) -> Any:
        return math.prod(dims)

    def _both(self, summed: Collection[str] = ()) -> Any:
        """Return what ranks of a host both need and have, on all hosts along some axes."""
        sides, found = (self.exchange.source, self.exchange.destination), 1
        index = sides[0].mesh.axis_index
        for dim, at in enumerate(self.dims):
            axes = tuple(index(a) for a in sides[1].split[dim] if a in summed)
            found = found * (at.both.sum(axes, keepdims=True) if axes else at.both)
        return found

    def _known(self, cache: Cache[_T], find: Callable[[Side, Side, int, _Digits], _T]) -> list[_T]:
        """Return something of each dim, which other exchanges may have asked for before."""
        source, destination = self.exchange.source, self.exchange.destination
        every = []
        for dim, extent in enumerate(source.shape):
            splits = source.split[dim], destination.split[dim]
            cuts = (x.layout.cuts.get(dim) for x in (source, destination))
            key = (source.mesh, extent, *splits, *cuts)
            found = cache.find(key)
            if found is None:
                found = find(source, destination, dim, self.digits)
                cache.put(key, found)
            every.append(found)
        return every


def _on_hosts(source: Side, destination: Side, dim: int, digits: _Digits) -> _OnHosts:
    extent, k = source.shape[dim], source.mesh.ndim
    have = rows_at(source.layout, dim, extent, digits.sender)
    need = rows_at(destination.layout, dim, extent, digits.receiver)
    near = tuple(range(k, 3 * k))
    return _OnHosts(
        *(
            np.asarray(x).sum(near, keepdims=True).reshape(np.shape(x)[:k]) if np.ndim(x) else x
            for x in (length(have), length(need), shared(have, need))
        )
    )


def _of_ranks(source: Side, destination: Side, dim: int, digits: _Digits) -> _OfRanks:
    extent, at = source.shape[dim], digits.alone
    both = (source.layout, destination.layout)
    own = shared(*(rows_at(layout, dim, extent, at) for layout in both)) > 0
    sent, got = (meeting(x, y, dim, extent, at)[1] for x, y in (both, both[::-1]))
    return _OfRanks(own, np.asarray(sent, np.int32), np.asarray(got, np.int32))
