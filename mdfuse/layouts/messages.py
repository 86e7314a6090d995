"""Numbering of an exchange's messages; the number of a message determines its sender."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.boxes import Box, Rows, nth_chunk
from mdfuse.layouts.endpoints import At, Side

#: Limit of shares per message: each share costs the receiver a start.
_MOST_SHARES = 8

#: Accepted ratio of the busiest holder's sends to the average; below it messages stay uncut.
_EVENLY = 6 / 5

#: Least number of elements of a share: fewer are not worth a message.
_LEAST_SHARE = 1024


class Met(NamedTuple):
    """The destination parts of a dim that overlap one source part.

    Attributes:
        start: the index of the first part.
        size: the number of parts.
        axes: the axes that split the dim in the destination.
        fixed: the coordinates that all these parts share, if they are whole blocks.
        inner: the axes along which all parts overlap, if they are whole blocks.
        is_fit: whether they are whole blocks, or no blocks split the dim.
        is_by_blocks: whether blocks split the dim.
    """

    start: int
    size: int
    axes: tuple[str, ...]
    fixed: dict[str, int]
    inner: tuple[str, ...]
    is_fit: bool
    is_by_blocks: bool


class _Shape(NamedTuple):
    """The message pattern that many source parts share.

    Attributes:
        blocks: the axes that tell blocks apart; in the holders' own block, some ranks lack nothing.
        digits: for each dim the axes that number its parts, the number of parts, and whether they
            count from the first overlapping part.
        stride: the number of ranks of the own block that lack one destination part.
        parts: the number of parts per block.
        others: the number of messages to other blocks.
        total: the number of messages.
        shares: the number of shares per message.
    """

    blocks: tuple[str, ...]
    digits: tuple[tuple[tuple[str, ...], int, bool], ...]
    stride: int
    parts: int
    others: int
    total: int
    shares: int


class Pattern:
    """The message pattern that all source parts share, along axes of the destination.

    Attributes:
        along: the axes along which ranks hold copies; axes that tell holders apart come first.
        common: the axes on which a destination part, and its holders, have one coordinate.
        blocks: the common axes that split dims: at the holders' coordinates, some lack nothing.
        all: the number of ranks that need one part.
        each: the number of these that hold a source part, where some do.
        lacking: the number of ranks that then lack the part.
        turns: the number of ranks that hold a source part.
        most_shares: the largest number of shares of a message.
    """

    def __init__(
        self, source: Side, destination: Side, staying: tuple[tuple[str, str], ...], may_share: bool
    ) -> None:
        is_one = source.mesh == destination.mesh
        self.source, self.destination, self.staying = source, destination, staying
        self.apart = tuple(a for a in destination.free if is_one and a in source.fixed)
        self.along = (*self.apart, *(a for a in destination.free if a not in self.apart))
        self.common = tuple(a for a in destination.fixed if is_one and a in source.fixed)
        terms = {b for _, b in staying}
        self.blocks = tuple(a for a in self.common if a not in terms)
        self.all = destination.count(self.along)
        self.each = self.all // destination.count(self.apart)
        self.lacking = self.all - self.each if is_one else self.all
        self.turns = source.count(source.free)
        self.most_shares = _most_shares(source, destination) if may_share else 1
        self._met: dict[tuple[int, ...], Met] = {}
        self._met_at: dict[tuple[int, int, int], Met] = {}
        self._shapes: dict[tuple[object, ...], _Shape] = {}

    def met(self, holders: At) -> list[Met]:
        """Return for each dim the destination parts that a source part overlaps."""
        met_parts, rows = list[Met](), None
        for dim, axes in enumerate(self.source.split):
            key = (dim, holders[axes[0]]) if len(axes) == 1 else (dim, *[holders[a] for a in axes])
            met = self._met.get(key)
            if met is None:
                rows = rows or self.source.rows(holders)
                met = self._met[key] = self.met_in(dim, rows[dim])
            met_parts.append(met)
        return met_parts

    def met_in(self, dim: int, rows: Rows) -> Met:
        """Return the destination parts that some rows of a dim overlap."""
        where = (dim, *self.destination.parts[dim].met(rows))
        met = self._met_at.get(where)
        if met is None:
            met = self._met_at[where] = self._meet(*where)
        return met

    def _meet(self, dim: int, first: int, n: int) -> Met:
        """Return the numbering of some parts of a dim.

        By blocks, where there are some and all parts along the inner axes are met.
        """
        ends, axes = self.ends[dim], self.destination.split[dim]
        fit = (e for e in ends if e[0] == n and first % e[0] == 0)
        size, outer, inner = next(fit, (0, (), ()))
        fixed = self.destination.numbered(first // size, outer) if size else {}
        return Met(first, n, axes, fixed, inner, not ends or size > 0, bool(ends))

    def shape(self, met: list[Met], is_fit: bool) -> _Shape:
        """Return the message pattern of all source parts with the same overlaps."""
        key = (is_fit, *[(m.size, m.inner if is_fit else None) for m in met])
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._shape(met, is_fit)
        return shape

    def _shape(self, met: list[Met], is_fit: bool) -> _Shape:
        count, stride, blocks = self.destination.count, self.all, tuple[str, ...]()
        digits = [(m.axes, m.size, True) for m in met]
        if is_fit:
            stride, fixed = self.lacking, {a for m in met for a in m.fixed}
            blocks = tuple(a for a in self.blocks if a not in fixed)
            for dim, m in enumerate(met):
                if m.is_by_blocks:
                    inside = tuple(a for a in m.inner if a not in blocks)
                    digits[dim] = inside, count(inside), False
        parts = math.prod([n for _, n, _ in digits])
        others = (count(blocks) - 1) * parts * self.all
        n = others + parts * stride
        return _Shape(blocks, tuple(digits), stride, parts, others, n, self.shares(n))

    @cached_property
    def ends(self) -> tuple[list[tuple[int, tuple[str, ...], tuple[str, ...]]], ...]:
        """For each dim that blocks split, its axes cut in two: (size of the inner, outer, inner).

        Parts that differ along the inner ones only follow each other.
        """
        return tuple(
            [(self.destination.count(axes[n:]), axes[:n], axes[n:]) for n in range(len(axes) + 1)]
            if {*axes} & {*self.blocks}
            else []
            for axes in self.destination.split
        )

    def shares(self, messages: int) -> int:
        """Return the number of shares per message.

        The fewest with which no holder sends over a fifth more than all do on average; where
        there are none, those with which it is least.
        """
        n, turns = max(messages, 1), self.turns
        if self.most_shares == 1 or n % turns == 0:
            return 1
        over = (-(-n * s // turns) * turns / (n * s) for s in range(1, self.most_shares + 1))
        return 1 + min(enumerate(over), key=lambda pair: max(pair[1], _EVENLY))[0]

    def has_turn(self, at: Mapping[str, Any], met: Sequence[tuple[Any, Any]]) -> Any:
        """Return a mask of the source ranks that have a turn to send.

        Args:
            at: the coordinates of all ranks.
            met: for each dim each rank's first overlapping destination part, and their number.
        """
        parts: Any = math.prod(n for _, n in met)
        is_fit: Any = True
        inner: dict[str, Any] = {}  # axis of blocks -> who meets several of its coordinates
        for (first, n), ends in zip(met, self.ends, strict=True):
            is_ended: Any = not ends
            for size, outside, inside in ends:
                ends_here = (n == size) & (first % size == 0) & ~np.asarray(is_ended)
                is_ended, place = is_ended | ends_here, first // size
                for a in reversed(outside):
                    place, i = np.divmod(place, self.destination.sizes[a])
                    is_fit = is_fit & (~ends_here | (a not in self.blocks) | (i == at[a]))
                inner |= {a: inner.get(a, False) | ends_here for a in inside if a in self.blocks}
            is_fit = is_fit & is_ended
        blocks: Any = 1
        own_block: Any = 0
        for a in self.blocks:
            n, is_met = self.destination.sizes[a], is_fit & inner.get(a, False)
            blocks, own_block = (
                blocks * np.where(is_met, n, 1),
                np.where(is_met, own_block * n + at[a], own_block),
            )
        fewer = parts // blocks * ((blocks - 1) * self.all + self.lacking)
        messages = np.where(is_fit, fewer, parts * self.all)
        shares: Any = 1
        if self.most_shares > 1:
            counts, which = np.unique(messages, return_inverse=True)
            shares = np.array([*map(self.shares, counts.tolist())])[which].reshape(messages.shape)
        turn = self.source.number(at, self.source.free) - np.where(blocks > 1, own_block + 1, 0)
        return turn % self.turns < messages * shares


def _most_shares(source: Side, destination: Side) -> int:
    """Return the largest number of shares of a message."""
    chunks = (x.layout.stream for x in (source, destination))
    if is_symbolic(source.shape) or any(c is not None and c.index is not None for c in chunks):
        return 1
    both = (x.layout.local_shape(x.shape) for x in (source, destination))
    largest: int = math.prod(map(min, *both))
    return max(1, min(_MOST_SHARES, largest // _LEAST_SHARE))


def nth_share(box: Box, shares: int, i: int) -> Box | None:
    """Return the i-th share of a box, cut along its longest dim; None where it is empty.

    >>> [nth_share(((0, 2), (4, 9)), 2, i) for i in range(2)]
    [((0, 2), (4, 7)), ((0, 2), (7, 9))]
    """
    if shares == 1:
        return box
    lengths = [stop - start for start, stop in box]
    dim = lengths.index(max(lengths))
    start, stop = nth_chunk(box[dim], shares, i)
    return (*box[:dim], (start, stop), *box[dim + 1 :]) if start < stop else None


class Messages:
    """The messages of one part of the source, to all ranks that lack it.

    They have numbers: first those to other blocks, whose ranks all lack it; those to ranks that
    need the same part of the destination follow each other. On one mesh, ranks that hold the part
    are left out, but where only some parts of a dim on which blocks depend are met.
    """

    def __init__(self, pattern: Pattern, holders: At) -> None:
        self.pattern, self.holders = pattern, holders
        self.destination = pattern.destination
        self.met = met = pattern.met(holders)
        #: coordinates that all receivers have
        self.fixed: dict[str, int] = {}
        is_fit = True
        if pattern.blocks:
            fixed = [(a, i) for m in met for a, i in m.fixed.items() if a in pattern.blocks]
            is_fit = all(m.is_fit for m in met) and all(i == holders[a] for a, i in fixed)
            self.fixed = {a: i for m in met for a, i in m.fixed.items()} if is_fit else {}
        self.shape = shape = pattern.shape(met, is_fit)
        self.count, self.shares = shape.total, shape.shares
        self.own = self.destination.number(holders, shape.blocks) if shape.blocks else 0
        #: who sends first: the holder that the first message would have if all blocks lacked it
        self.turn = self.own + 1 if shape.blocks else 0

    @cached_property
    def terms(self) -> dict[str, int]:
        return {b: self.holders[a] for a, b in self.pattern.staying}

    @cached_property
    def first(self) -> int:
        """The number of the first holder among the ranks that need a part."""
        return self.destination.number(self.holders, self.pattern.apart) * self.pattern.each

    def number(self, at: At) -> int:
        """Return the number of the message to the rank at some coordinates, which lacks it."""
        part, pattern, shape, number = 0, self.pattern, self.shape, self.destination.number
        for (axes, count, is_met), m in zip(shape.digits, self.met, strict=True):
            if count > 1:
                part = part * count + number(at, axes) - (m.start if is_met else 0)
        n = number(at, pattern.along)
        block = number(at, shape.blocks) if shape.blocks else 0
        if block != self.own:
            return ((block - (block > self.own)) * shape.parts + part) * pattern.all + n
        has_holders = pattern.lacking < pattern.all and self._is_common(at)
        n -= pattern.each if has_holders and n >= self.first else 0
        return shape.others + part * shape.stride + n

    def receiver(self, number: int) -> dict[str, int] | None:
        """Return the coordinates of the rank that a message goes to; None where there is none."""
        pattern, shape, block = self.pattern, self.shape, self.own
        if number < shape.others:
            block, number = divmod(number, shape.parts * pattern.all)
            block += block >= self.own
            part, n = divmod(number, pattern.all)
        else:
            part, n = divmod(number - shape.others, shape.stride)
        at = self.terms | self.fixed | self.destination.numbered(block, shape.blocks)
        for (axes, count, is_met), m in zip(
            reversed(shape.digits), reversed(self.met), strict=True
        ):
            part, i = divmod(part, count)
            at |= self.destination.numbered(i + (m.start if is_met else 0), axes)
        if block == self.own and pattern.lacking < pattern.all and self._is_common(at):
            if n >= pattern.lacking:
                return None
            n += pattern.each if n >= self.first else 0
        return at | self.destination.numbered(n, pattern.along)

    def receivers(self) -> Any:
        """Return all ranks that need the part, holders included, in the order of messages."""
        mesh = self.destination.mesh
        dims = self.destination.split
        first = (*sum(dims, ()), *self.terms)
        order = [mesh.axis_index(a) for a in (*first, *self.pattern.along)]
        order += [i for i in range(mesh.ndim) if i not in order]  # of one rank
        grid = self.destination.grid.transpose(order)
        grid = grid.reshape(*map(self.destination.count, (*dims, *((a,) for a in self.terms))), -1)
        parts = (slice(m.start, m.start + m.size) for m in self.met)
        return grid[(*parts, *self.terms.values())].reshape(-1)

    def _is_common(self, at: At) -> bool:
        return all(at[a] == self.holders[a] for a in self.pattern.common)
