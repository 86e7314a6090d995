"""Who sends which box to whom, where ranks receive from others just what they lack.

A part of the source is sent by all ranks that hold it in turn: its messages have numbers, and the
n-th holder sends the n-th of them, and so on round. A rank's part costs as many steps as it has
messages, since numbers follow from coordinates, not from a walk over ranks. Where hosts are known,
holders on the receiver's host come first, and all messages of a part are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from mdfuse.layouts.boxes import Box, Interval, intersect, nth_chunk
from mdfuse.layouts.hosts import hosts_by_rank, senders
from mdfuse.layouts.layout import Layout, Partial
from mdfuse.mesh import DeviceMesh

#: axis -> coordinate
At = Mapping[str, int]


@dataclass(frozen=True)
class Side:
    """The source or the destination of an exchange: which parts there are, and who has them."""

    layout: Layout
    shape: tuple[int, ...]

    @property
    def mesh(self) -> DeviceMesh:
        return self.layout.mesh

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """The axes along which ranks hold different parts, or different terms."""
        split = (a for _, axes in self.layout.splits for a in axes)
        return (*self.layout.partial_axes, *split)

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same."""
        return tuple(a for a in self.mesh.axes if a not in self.fixed)

    @cached_property
    def grid(self) -> Any:
        """The ranks, an array with the axes of the mesh."""
        return np.array(self.mesh.ranks).reshape(self.mesh.shape)

    def count(self, axes: tuple[str, ...]) -> int:
        return math.prod(map(self.mesh.axis_size, axes))

    def at(self, rank: int) -> At | None:
        """Return the coordinates of a rank; None where it is not in the mesh."""
        coordinate = self.mesh.coordinate(rank)
        return None if coordinate is None else dict(zip(self.mesh.axes, coordinate, strict=True))

    def rank(self, at: At) -> int:
        return self.mesh.rank_at([at[a] for a in self.mesh.axes])

    def number(self, at: At, axes: tuple[str, ...]) -> int:
        """Return the position of coordinates in the order along some axes, the last one fastest."""
        n = 0
        for a in axes:
            n = n * self.mesh.axis_size(a) + at[a]
        return n

    def numbered(self, n: int, axes: tuple[str, ...]) -> dict[str, int]:
        """Return the coordinates at a position in the order along some axes."""
        found = {}
        for a in reversed(axes):
            n, found[a] = divmod(n, self.mesh.axis_size(a))
        return found

    def box(self, at: At) -> Box:
        """Return what ranks at some coordinates hold; the axes that split dims are enough."""
        return tuple(self._interval(d, at) for d in range(len(self.shape)))

    def _interval(self, dim: int, at: At) -> Interval:
        reach = self.layout.reach(dim)
        interval = (0, self.shape[dim] if reach is None else reach.of)
        for axis in self.layout.split_axes(dim):
            interval = nth_chunk(interval, self.mesh.axis_size(axis), at[axis])
        if reach is not None:
            interval = reach.rows(interval, self.shape[dim])
        chunk = self.layout.stream
        if chunk is not None and chunk.index is not None and chunk.dim == dim:
            i = chunk.index if isinstance(chunk.index, int) else chunk.largest
            interval = chunk.interval(interval, i)
        return interval

    def parts(self, box: Box) -> list[range]:
        """Return for each dim the positions of the parts that have rows of a box.

        Some of them may be empty: `torch.chunk` makes empty parts, also between others.
        """
        return [
            range(self._position(d, start), self._position(d, stop - 1) + 1)
            if self.layout.reach(d) is None
            else self._reaching(d, start, stop)
            for d, (start, stop) in enumerate(box)
        ]

    def _reaching(self, dim: int, start: int, stop: int) -> range:
        """Return from the first to the last part that reaches into some rows of a dim."""
        parts = enumerate(self.layout.chunks_of(dim, self.shape[dim]))
        found = [n for n, (_, (a, b)) in parts if max(a, start) < min(b, stop)]
        return range(found[0], found[-1] + 1) if found else range(0)

    def _position(self, dim: int, row: int) -> int:
        """Return which part of a dim, in the order of rows, has a row."""
        interval, position = (0, self.shape[dim]), 0
        for axis in self.layout.split_axes(dim):
            n = self.mesh.axis_size(axis)
            i = (row - interval[0]) // -(-(interval[1] - interval[0]) // n)
            interval, position = nth_chunk(interval, n, i), position * n + i
        return position

    def part(self, positions: tuple[int, ...]) -> dict[str, int]:
        """Return the coordinates of a part, along the axes that split dims."""
        found: dict[str, int] = {}
        for dim, axes in self.layout.splits:
            found |= self.numbered(positions[dim], axes)
        return found


@dataclass(frozen=True)
class Exchange:
    """An exchange of a tensor; each rank receives what it lacks of each term that it needs.

    Along Partial axes that the destination has, too, each term goes to the ranks that are to have
    it; along the others, which are reduced, all terms go to each rank.
    """

    source: Side
    destination: Side

    @cached_property
    def kept(self) -> tuple[tuple[str, str], ...]:
        """Pairs of axes of the source and the destination along which terms stay apart."""
        return kept_terms(self.source.layout, self.destination.layout)

    @cached_property
    def reduced(self) -> tuple[str, ...]:
        """The axes of the source along which the receiver reduces."""
        kept = [a for a, _ in self.kept]
        return tuple(a for a in self.source.layout.partial_axes if a not in kept)

    # -- messages --------------------------------------------------------------------------------

    def received(self, rank: int) -> Iterator[tuple[int, Box, int]]:
        """Yield (who has it, box, number of the term) for all that a rank needs, in order."""
        source, at = self.source, self.destination.at(rank)
        need = self.destination.box(at) if at is not None else ()
        if at is None or any(start >= stop for start, stop in need):
            return
        terms = {a: at[b] for a, b in self.kept}
        for positions in product(*source.parts(need)):
            part = source.part(positions)
            block = intersect(source.box(part), need)
            if block is None:
                continue
            for n in range(source.count(self.reduced)):
                holders = part | terms | source.numbered(n, self.reduced)
                yield self._sender(holders, rank, at), block, n

    def sent(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield (who receives it, box) for all that a rank sends to others."""
        at = self.source.at(rank)
        box = self.source.box(at) if at is not None else ()
        if at is None or any(start >= stop for start, stop in box):
            return
        holders = {a: at[a] for a in self.source.fixed}
        for to in self._receivers(rank, at, holders):
            block = intersect(box, self.destination.box(to))
            if block is not None:
                receiver = self.destination.rank(to)
                if not self._holds(receiver, holders):
                    yield receiver, block

    def _receivers(self, rank: int, at: At, holders: At) -> Iterator[At]:
        """Yield the coordinates of the ranks that a rank sends to, and of some that lack nothing.

        Args:
            rank: who sends.
            at: its coordinates.
            holders: those of all ranks that hold what it holds.
        """
        if self.by_host:
            receivers, by = self._turns(holders)
            yield from filter(None, map(self.destination.at, receivers[by == rank].tolist()))
            return
        messages = self._messages(holders)
        step = self.source.count(self.source.free)
        for n in range(self.source.number(at, self.source.free), messages.count, step):
            to = messages.receiver(n)
            if to is not None:
                yield to

    def _holds(self, rank: int, holders: At) -> bool:
        at = self.source.at(rank)
        return at is not None and all(at[a] == i for a, i in holders.items())

    def _sender(self, holders: At, receiver: int, at: At) -> int:
        """Return the holder that sends to a receiver; itself, where it is one."""
        if self._holds(receiver, holders):
            return receiver
        source = self.source
        if self.by_host:
            receivers, by = self._turns(holders)
            return int(by[receivers == receiver][0])
        n = self._messages(holders).number(at) % source.count(source.free)
        return source.rank({**holders, **source.numbered(n, source.free)})

    @cached_property
    def by_host(self) -> bool:
        """Whether hosts decide who sends: they are known, and there is a choice."""
        is_known = hosts_by_rank(self.source.mesh, self.destination.mesh) is not None
        return is_known and self.source.count(self.source.free) > 1

    def senders(self) -> Any:
        """Return the ranks that have a turn, by hosts; some of those that send, twice or more."""
        sizes = (range(self.source.mesh.axis_size(a)) for a in self.source.fixed)
        parts = (dict(zip(self.source.fixed, at, strict=True)) for at in product(*sizes))
        full = (p for p in parts if all(start < stop for start, stop in self.source.box(p)))
        return np.concatenate([self._turns(p)[1] for p in full] or [np.array([], int)])

    def _turns(self, holders: At) -> tuple[Any, Any]:
        """Return (ranks that lack what some hold, who sends it to each), by hosts."""
        key = tuple(holders[a] for a in self.source.fixed)
        if key not in self._known:
            source = self.source
            have = source.grid[
                tuple(holders.get(a, slice(None)) for a in source.mesh.axes)
            ].reshape(-1)
            lack = self._messages(holders).receivers()
            lack = lack[~np.isin(lack, have)]
            hosts = hosts_by_rank(source.mesh, self.destination.mesh)
            self._known[key] = lack, senders(have, lack, hosts)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[Any, Any]]:
        return {}

    @property
    def stride(self) -> int:
        """How many messages one part of the source has for each part of the destination."""
        return self._messages(dict.fromkeys(self.source.fixed, 0)).stride

    def _messages(self, holders: At) -> _Messages:
        return _Messages(self, holders)


class _Messages:
    """The messages of one part of the source, to all ranks that lack it.

    They have numbers: those to ranks that need the same part of the destination follow each other.
    On one mesh, ranks that hold the part are left out where all parts have as many of them.
    """

    def __init__(self, exchange: Exchange, holders: At) -> None:
        source, destination = exchange.source, exchange.destination
        self.destination, self.holders = destination, holders
        self.ranges = destination.parts(source.box(holders))
        self.terms = {b: holders[a] for a, b in exchange.kept}
        is_one = source.mesh == destination.mesh
        #: the axes along which receivers of one part differ, those that tell holders apart first
        self.apart = tuple(a for a in destination.free if is_one and a in holders)
        self.along = (*self.apart, *(a for a in destination.free if a not in self.apart))
        #: axes on which a part of the destination is at one coordinate, as holders are
        self.common = tuple(a for a in destination.fixed if is_one and a in holders)
        self.all = destination.count(self.along)
        self.each = self.all // destination.count(self.apart)  # holders among these receivers
        self.first = destination.number(holders, self.apart) * self.each
        self.lacking = self.all - self.each if is_one else self.all
        kept = {b for _, b in exchange.kept}
        self.stride = self.lacking if kept.issuperset(self.common) else self.all
        self.count = math.prod(map(len, self.ranges)) * self.stride

    def number(self, at: At) -> int:
        """Return the number of the message to the rank at some coordinates, which lacks it."""
        part = 0
        for dim, positions in enumerate(self.ranges):
            axes = self.destination.layout.split_axes(dim)
            part = part * len(positions) + self.destination.number(at, axes) - positions.start
        n = self.destination.number(at, self.along)
        has_holders = self.lacking < self.all and self._is_common(at)
        return part * self.stride + (n - self.each if has_holders and n >= self.first else n)

    def receiver(self, number: int) -> dict[str, int] | None:
        """Return the coordinates of the rank that a message goes to; None where there is none."""
        part, n = divmod(number, self.stride)
        positions = []
        for found in reversed(self.ranges):
            part, i = divmod(part, len(found))
            positions.append(found[i])
        at = self.destination.part(tuple(reversed(positions))) | self.terms
        if self.lacking < self.all and self._is_common(at):
            if n >= self.lacking:
                return None
            n += self.each if n >= self.first else 0
        return at | self.destination.numbered(n, self.along)

    def receivers(self) -> Any:
        """Return all ranks that need the part, holders included, in the order of messages."""
        layout, mesh = self.destination.layout, self.destination.mesh
        dims = [layout.split_axes(d) for d in range(len(self.ranges))]
        first = (*sum(dims, ()), *self.terms)
        order = [mesh.axis_index(a) for a in (*first, *self.along)]
        order += [i for i in range(mesh.ndim) if i not in order]  # of one rank
        grid = self.destination.grid.transpose(order)
        grid = grid.reshape(*map(self.destination.count, (*dims, *((a,) for a in self.terms))), -1)
        parts = (slice(r.start, r.stop) for r in self.ranges)
        return grid[(*parts, *self.terms.values())].reshape(-1)

    def _is_common(self, at: At) -> bool:
        return all(at[a] == self.holders[a] for a in self.common)


def kept_terms(source: Layout, destination: Layout) -> tuple[tuple[str, str], ...]:
    """Return pairs of axes along which both are Partial, the terms of the one those of the other.

    On one mesh these are the same axes. On two, all Partial axes are, in their order, if they have
    the same sizes and reduce ops; () where they do not.

    >>> from mdfuse.layouts.layout import Partial
    >>> one, other = DeviceMesh.arange(a=2, b=4), DeviceMesh([[8, 9], [6, 7]], axes=("p", "q"))
    >>> kept_terms(Layout(one, {"a": Partial("max")}), Layout(other, {"q": Partial("max")}))
    (('a', 'q'),)
    """
    if source.mesh == destination.mesh:
        axes = zip(source.mesh.axes, source.mesh.shape, strict=True)
        both = zip(axes, source.placements, destination.placements, strict=True)
        return tuple((a, a) for (a, n), p, q in both if n > 1 and isinstance(p, Partial) and p == q)
    terms = [
        [
            (a, x.mesh.axis_size(a), x.placement(a))
            for a in x.partial_axes
            if x.mesh.axis_size(a) > 1
        ]
        for x in (source, destination)
    ]
    if [t[1:] for t in terms[0]] != [t[1:] for t in terms[1]]:
        return ()
    return tuple((a, b) for (a, *_), (b, *_) in zip(*terms, strict=True))
