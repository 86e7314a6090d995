"""The numbers of an exchange's messages, from which follows who sends which of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.boxes import Box, nth_chunk
from mdfuse.layouts.side import At, Side

#: In how many shares a message is sent at most: the receiver has to start each of them.
_MOST_SHARES = 8

#: Elements of a share, at least: fewer are not worth a message.
_LEAST_SHARE = 1024


class Pattern:
    """What the messages of all parts of the source have in common, along axes of the destination.

    Attributes:
        along: the axes along which ranks hold the same; those that tell holders apart first.
        common: axes on which a part of the destination is at one coordinate, as holders are.
        blocks: those of them that split dims: at the holders' own coordinates, some lack nothing.
        all: how many ranks need one part.
        each: how many of these hold a part of the source, where some do.
        lacking: how many then lack it.
        turns: how many ranks hold a part of the source.
        most_shares: in how many shares a message is sent at most.
    """

    def __init__(
        self, source: Side, destination: Side, kept: tuple[tuple[str, str], ...], may_share: bool
    ) -> None:
        is_one = source.mesh == destination.mesh
        self.source, self.destination, self.kept = source, destination, kept
        self.apart = tuple(a for a in destination.free if is_one and a in source.fixed)
        self.along = (*self.apart, *(a for a in destination.free if a not in self.apart))
        self.common = tuple(a for a in destination.fixed if is_one and a in source.fixed)
        terms = {b for _, b in kept}
        self.blocks = tuple(a for a in self.common if a not in terms)
        self.all = destination.count(self.along)
        self.each = self.all // destination.count(self.apart)
        self.lacking = self.all - self.each if is_one else self.all
        self.turns = source.count(source.free)
        self.most_shares = _most_shares(source, destination) if may_share else 1
        self._ranges: dict[tuple[int, ...], range] = {}

    def range(self, dim: int, holders: At) -> range:
        """Return the positions of the destination's parts of a dim that a part meets."""
        key = (dim, *[holders[a] for a in self.source.split[dim]])
        if key not in self._ranges:
            rows = self.source.rows(holders)[dim]
            self._ranges[key] = self.destination.positions(dim, rows)
        return self._ranges[key]

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
        """Return in how many shares each of some messages is sent."""
        return max(1, min(self.turns // max(messages, 1), self.most_shares))

    def has_turn(self, at: Mapping[str, Any], met: Sequence[tuple[Any, Any]]) -> Any:
        """Return which ranks of the source have a turn to send; arrays.

        Args:
            at: the coordinates of all ranks.
            met: for each dim the first part of the destination that each meets, and how many.
        """
        parts: Any = math.prod(n for _, n in met)
        is_fit: Any = True
        inner: dict[str, Any] = {}  # axis of blocks -> who meets several of its coordinates
        for (first, n), ends in zip(met, self.ends, strict=True):
            found: Any = not ends
            for size, outside, inside in ends:
                here = (n == size) & (first % size == 0) & ~np.asarray(found)
                found, place = found | here, first // size
                for a in reversed(outside):
                    place, i = np.divmod(place, self.destination.sizes[a])
                    is_fit = is_fit & (~here | (a not in self.blocks) | (i == at[a]))
                inner |= {a: inner.get(a, False) | here for a in inside if a in self.blocks}
            is_fit = is_fit & found
        blocks: Any = 1
        own: Any = 0
        for a in self.blocks:
            n, is_met = self.destination.sizes[a], is_fit & inner.get(a, False)
            blocks, own = blocks * np.where(is_met, n, 1), np.where(is_met, own * n + at[a], own)
        fewer = parts // blocks * ((blocks - 1) * self.all + self.lacking)
        messages = np.where(is_fit, fewer, parts * self.all)
        shares = np.clip(self.turns // np.maximum(messages, 1), 1, self.most_shares)
        turn = self.source.number(at, self.source.free) - np.where(blocks > 1, own + 1, 0)
        return turn % self.turns < messages * shares


def _most_shares(source: Side, destination: Side) -> int:
    """Return into how many shares the largest message may be cut."""
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
        self.destination = destination = pattern.destination
        dims = range(len(destination.shape))
        self.ranges = [pattern.range(dim, holders) for dim in dims]
        self.terms = {b: holders[a] for a, b in pattern.kept}
        self.first = destination.number(holders, pattern.apart) * pattern.each
        self.blocks: tuple[str, ...] = ()
        self.stride = pattern.all
        self.digits = [
            (axes, found.start, len(found))
            for axes, found in zip(destination.split, self.ranges, strict=True)
        ]
        #: coordinates that all receivers have
        self.fixed: dict[str, int] = {}
        self._find_blocks()
        self.parts = math.prod([count for *_, count in self.digits])
        self.own = destination.number(holders, self.blocks)
        #: how many go to other blocks
        self.others = (destination.count(self.blocks) - 1) * self.parts * pattern.all
        self.count = self.others + self.parts * self.stride
        self.shares = pattern.shares(self.count)
        #: who sends first: the holder that the first message would have if all blocks lacked it
        self.turn = self.own + 1 if self.blocks else 0

    def _find_blocks(self) -> None:
        """Number by blocks where some lack nothing, and all parts along the inner axes are met."""
        pattern, runs = self.pattern, dict[int, tuple[str, ...]]()
        fixed: dict[str, int] = {}
        for dim, ends in enumerate(pattern.ends):
            found = self.ranges[dim]
            fit = (e for e in ends if e[0] == len(found) and found.start % e[0] == 0)
            size, outer, runs[dim] = next(fit, (0, (), ()))
            if size:
                fixed |= self.destination.numbered(found.start // size, outer)
            elif ends:
                return
        if any(a in pattern.blocks and i != self.holders[a] for a, i in fixed.items()):
            return
        self.fixed, self.stride = fixed, pattern.lacking
        self.blocks = tuple(a for a in pattern.blocks if a not in fixed)
        for dim, inner in runs.items():
            if pattern.ends[dim]:
                inside = tuple(a for a in inner if a not in self.blocks)
                self.digits[dim] = inside, 0, self.destination.count(inside)

    def number(self, at: At) -> int:
        """Return the number of the message to the rank at some coordinates, which lacks it."""
        part, pattern = 0, self.pattern
        for axes, start, count in self.digits:
            part = part * count + self.destination.number(at, axes) - start
        n = self.destination.number(at, pattern.along)
        block = self.destination.number(at, self.blocks)
        if block != self.own:
            return ((block - (block > self.own)) * self.parts + part) * pattern.all + n
        has_holders = pattern.lacking < pattern.all and self._is_common(at)
        n -= pattern.each if has_holders and n >= self.first else 0
        return self.others + part * self.stride + n

    def receiver(self, number: int) -> dict[str, int] | None:
        """Return the coordinates of the rank that a message goes to; None where there is none."""
        pattern, block = self.pattern, self.own
        if number < self.others:
            block, number = divmod(number, self.parts * pattern.all)
            block += block >= self.own
            part, n = divmod(number, pattern.all)
        else:
            part, n = divmod(number - self.others, self.stride)
        at = self.terms | self.fixed | self.destination.numbered(block, self.blocks)
        for axes, start, count in reversed(self.digits):
            part, i = divmod(part, count)
            at |= self.destination.numbered(start + i, axes)
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
        parts = (slice(r.start, r.stop) for r in self.ranges)
        return grid[(*parts, *self.terms.values())].reshape(-1)

    def _is_common(self, at: At) -> bool:
        return all(at[a] == self.holders[a] for a in self.pattern.common)
