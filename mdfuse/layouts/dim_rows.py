"""One dim of a tensor on a mesh: the rows of ranks and hosts, by the axes that split it.

Axes are numbers here. An array has one axis per mesh axis, of size 1 if its content does not depend
on it, so that few numbers describe all ranks. Lengths of equal parts are plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mdfuse.layouts.blocks import Blocks, segments
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.recv_volume import cut, length, place_of, shared

_T = TypeVar("_T")
_Axes = tuple[int, ...]

#: Approximate limit of cached numbers per dim.
_NUMBERS = 2**18


class Cut(NamedTuple):
    """The cut of a dim in blocks: the blocks, and the axes that split the dim as one interval."""

    blocks: Blocks
    plain: frozenset[int]


class OnHosts(NamedTuple):
    """Row counts of a dim on each host.

    Attributes:
        has: the rows of all source parts on the host.
        needs: the rows of all destination parts on the host.
        both: the rows shared by source and destination parts, over all pairs on the host.
    """

    has: Any
    needs: Any
    both: Any


class OfRanks(NamedTuple):
    """Message counts of each rank in one dim.

    Attributes:
        own: whether the rank has some of the rows that it needs.
        sent: the number of destination parts that its source part overlaps.
        got: the number of source parts that its destination part overlaps.
    """

    own: Any
    sent: Any
    got: Any


class DimRows:
    """The rows of a dim before and after an exchange on one mesh.

    Args:
        sizes: the sizes of the mesh axes.
        near: the size of each axis within a host.
        extent: the extent of the dim, a number.
        cuts: the cuts before and afterwards; None where the dim is not in blocks.
    """

    def __init__(
        self, sizes: _Axes, near: _Axes, extent: int, cuts: tuple[Cut | None, Cut | None]
    ) -> None:
        self.sizes, self.extent, self.cuts = sizes, extent, cuts
        self.blocks = tuple(segments(c.blocks if c is not None else None, extent) for c in cuts)
        self.is_blocked = cuts != (None, None)
        far, k = tuple(n // m for n, m in zip(sizes, near, strict=True)), len(sizes)
        grid = np.ogrid[tuple(map(slice, (*far, *near, *near)))]
        #: coordinates of each rank, and of (sender, receiver) pairs on one host
        self._at: dict[str, Any] = {
            "rank": np.ogrid[tuple(map(slice, sizes))],
            "sender": [grid[i] * near[i] + grid[2 * k + i] for i in range(k)],
            "receiver": [grid[i] * near[i] + grid[k + i] for i in range(k)],
        }
        self._near = near
        self._known: dict[tuple[Any, ...], Any] = {}
        self._kept = 0  # cached numbers

    def rows(self, axes: _Axes, is_needed: bool = False) -> list[tuple[Any, Any]]:
        """Return (start, stop) of each rank's part in each block."""
        return self._rows(axes, is_needed, "rank")

    def overlap(self, have: _Axes, need: _Axes) -> tuple[Any, Any]:
        """Return the number of rows that each rank needs, and the number of these that it has."""
        return self._once(("overlap", have, need), lambda: self._overlap(have, need))

    def on_hosts(self, have: _Axes, need: _Axes) -> OnHosts:
        """Return the row counts of hosts."""
        return self._once(("hosts", have, need), lambda: self._on_hosts(have, need))

    def on_first(self, axes: _Axes) -> int:
        """Return the number of rows on the first host."""
        if self.is_blocked:
            has = self._summed(axes, False)
            return has if type(has) is int else int(has.item(0))
        return self._first_of(self.extent, axes)

    def _first_of(self, rows: int, axes: _Axes) -> int:
        """Return the same for some rows that axes split into equal parts and a shorter one."""
        if not axes or not rows:
            return rows
        part, near = -(-rows // self.sizes[axes[0]]), self._near[axes[0]]
        rows_together = min(rows // part, near) * self._first_of(part, axes[1:])
        return rows_together + (self._first_of(rows % part, axes[1:]) if rows // part < near else 0)

    def of_ranks(self, have: _Axes, need: _Axes) -> OfRanks:
        """Return the message counts of ranks in this dim."""
        return self._once(("ranks", have, need), lambda: self._of_ranks(have, need))

    def lengths(self, axes: _Axes) -> Any:
        """Return the number of rows of each rank: an array over hosts and ranks of a host."""
        return self._length(axes, False, "sender")

    def _once(self, key: tuple[Any, ...], find: Callable[[], _T]) -> _T:
        answer: _T | None = self._known.get(key)
        if answer is None:
            answer = find()
            if self._kept > _NUMBERS:
                self._known.clear()
                self._kept = 0
            self._known[key] = answer
            self._kept += _numbers(answer)
        return answer

    def part(self, axes: _Axes, is_needed: bool = False) -> int | None:
        """Return the number of rows of each part; None if parts differ, or are in blocks."""
        n = math.prod([self.sizes[a] for a in axes])
        is_equal = len(self.blocks[is_needed]) == 1 and self.extent % n == 0
        return self.extent // n if is_equal else None

    def _rows(self, axes: _Axes, is_needed: bool, who: str) -> list[tuple[Any, Any]]:
        key = (who, axes, is_needed)
        return self._once(key, lambda: self._cut(axes, is_needed, self._at[who]))

    def _cut(self, axes: _Axes, is_needed: bool, at: Any) -> list[tuple[Any, Any]]:
        if self.part(axes, is_needed) is not None:
            rows, start = self.extent, 0
            for a in axes:
                rows //= self.sizes[a]
                start = start + at[a] * rows
            return [(start, start + rows)]
        of = self.cuts[is_needed]
        splits = [(self.sizes[a], at[a], of is None or a in of.plain) for a in axes]
        return cut(self.blocks[is_needed], splits)

    def _length(self, axes: _Axes, is_needed: bool, who: str) -> Any:
        part = self.part(axes, is_needed)
        if part is not None:
            return part
        key = ("length", who, axes, is_needed)
        return self._once(key, lambda: length(self._rows(axes, is_needed, who)))

    def _within(self, have: _Axes, need: _Axes) -> bool | None:
        """Return True if destination parts nest in source parts, False for the converse, or None.

        They nest if the axes that split the dim before are the outermost ones afterwards.
        """
        is_alike = self.cuts[0] == self.cuts[1]
        if not have or (is_alike and need[: len(have)] == have):
            return True
        return False if not need or (is_alike and have[: len(need)] == need) else None

    def _overlap(self, have: _Axes, need: _Axes) -> tuple[Any, Any]:
        rows, is_within = self._length(need, True, "rank"), self._within(have, need)
        if is_within is not None:
            return rows, rows if is_within else self._length(have, False, "rank")
        return rows, shared(self.rows(need, True), self.rows(have))

    def _on_hosts(self, have: _Axes, need: _Axes) -> OnHosts:
        has, needs = self._summed(have, False), self._summed(need, True)
        is_within = self._within(have, need)
        if is_within is not None:  # each inner part lies in one outer part
            return OnHosts(has, needs, needs if is_within else has)
        before, after = self._rows(have, False, "sender"), self._rows(need, True, "receiver")
        return OnHosts(has, needs, self._sum(shared(after, before)))

    def _summed(self, axes: _Axes, is_needed: bool) -> Any:
        """Return the number of rows of all parts on each host."""
        part = self.part(axes, is_needed)
        if part is not None:
            return part * math.prod([self._near[a] for a in axes])
        key = ("summed", axes, is_needed)
        return self._once(key, lambda: self._sum(self._length(axes, is_needed, "sender")))

    def _sum(self, found: Any) -> Any:
        """Return the sum over the ranks of each host; a number if all hosts have the same."""
        if not np.ndim(found):
            return found
        k = len(self.sizes)
        sums = found.sum(tuple(range(k, 3 * k)))
        first = sums.item(0)
        return first if sums.size == 1 or (sums == first).all() else sums

    def _of_ranks(self, have: _Axes, need: _Axes) -> OfRanks:
        has_own = self.overlap(have, need)[1] > 0
        return OfRanks(has_own, self._met(have, need, False), self._met(need, have, True))

    def _met(self, axes: _Axes, others: _Axes, is_needed: bool) -> Any:
        """Return the number of parts along `others` that each rank's part overlaps; blocks: all."""
        sizes = tuple([self.sizes[a] for a in others])
        if self.is_blocked:
            rows = length(self.rows(axes, is_needed))
            return np.where(rows > 0, math.prod(sizes), 0)
        part, other = self.part(axes), self.part(others)
        if part is not None and other is not None and part and (part % other == 0):
            return part // other
        if part is not None and other is not None and part and other % part == 0:
            return 1
        ((start, stop),) = self.rows(axes, is_needed)
        if axes[: len(others)] == others:  # each part nests in one of the others
            return np.where(stop > start, 1, 0)
        first, last = (place_of(sizes, self.extent, row) for row in (start, stop - 1))
        return np.where(stop > start, last - first + 1, 0)


def _numbers(found: Any) -> int:
    """Return the count of numbers in a cached answer."""
    if isinstance(found, np.ndarray):
        return found.size
    return sum([_numbers(x) for x in found]) if isinstance(found, tuple | list) else 1


@lru_cache(maxsize=64)
def _known(sizes: _Axes, near: _Axes, extent: int, cuts: tuple[Cut | None, Cut | None]) -> DimRows:
    return DimRows(sizes, near, extent, cuts)


def dims_of(
    source: Layout, destination: Layout, shape: tuple[int, ...], near: _Axes
) -> tuple[DimRows, ...]:
    """Return the dims of a tensor for two layouts on one mesh."""
    mesh = source.mesh
    if not source.blocked and not destination.blocked:
        return tuple([_known(mesh.shape, near, extent, (None, None)) for extent in shape])
    return tuple(
        _known(mesh.shape, near, extent, (_cut_of(source, d), _cut_of(destination, d)))
        for d, extent in enumerate(shape)
    )


def _cut_of(layout: Layout, dim: int) -> Cut | None:
    dim_cut, index = layout.cuts.get(dim), layout.mesh.axes.index
    if dim_cut is None:
        return None
    return Cut(dim_cut.blocks, frozenset(map(index, dim_cut.plain)))
