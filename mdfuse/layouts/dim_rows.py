"""One dim of a tensor on a mesh: the rows of ranks and hosts, by the axes that split it.

Axes are numbers here. An array has one axis per mesh axis, of size 1 if its content does not depend
on it, so that few numbers describe all ranks. Lengths of equal parts are plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.blocks import Blocks
from mdfuse.layouts.boxes import ManyRows
from mdfuse.layouts.dim_parts import Parts, length, shared
from mdfuse.layouts.layout import Layout

_T = TypeVar("_T")
_Axes = tuple[int, ...]

#: Approximate limit of cached numbers per dim.
_NUMBERS = 2**18


class DimCut(NamedTuple):
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
        has_some: whether the rank has some of the rows that it needs.
        sent: the number of destination parts that its source part overlaps.
        got: the number of source parts that its destination part overlaps.
    """

    has_some: Any
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
        self, sizes: _Axes, near: _Axes, extent: int, cuts: tuple[DimCut | None, DimCut | None]
    ) -> None:
        self.sizes, self.extent, self.cuts = sizes, extent, cuts
        self.is_blocked = cuts != (None, None)
        self._near = near
        self._parts: dict[tuple[_Axes, bool], Parts] = {}
        self._known: dict[tuple[Any, ...], Any] = {}
        self._count = 0  # of cached numbers

    @cached_property
    def _at(self) -> dict[str, Any]:
        """Coordinates of each rank, and of (sender, receiver) pairs on one host."""
        near, k = self._near, len(self.sizes)
        far = [n // m for n, m in zip(self.sizes, near, strict=True)]
        grid = np.ogrid[tuple(map(slice, (*far, *near, *near)))]
        return {
            "rank": np.ogrid[tuple(map(slice, self.sizes))],
            "sender": [grid[i] * near[i] + grid[2 * k + i] for i in range(k)],
            "receiver": [grid[i] * near[i] + grid[k + i] for i in range(k)],
        }

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
            if self._count > _NUMBERS:
                self._known.clear()
                self._count = 0
            self._known[key] = answer
            self._count += _numbers(answer)
        return answer

    def parts(self, axes: _Axes, is_needed: bool = False) -> Parts:
        """Return the parts of the dim if some axes split it."""
        parts = self._parts.get((axes, is_needed))
        if parts is None:
            sizes, cut = tuple([self.sizes[a] for a in axes]), self.cuts[is_needed]
            if cut is None:
                parts = Parts(self.extent, sizes, (True,) * len(sizes))
            else:
                plain = tuple([a in cut.plain for a in axes])
                parts = Parts(self.extent, sizes, plain, cut.blocks)
            self._parts[axes, is_needed] = parts
        return parts

    def rows(self, axes: _Axes, is_needed: bool = False, who: str = "rank") -> ManyRows:
        """Return (start, stop) of each rank's part in each block: arrays."""
        key, at = (who, axes, is_needed), self._at[who]
        return self._once(key, lambda: self.parts(axes, is_needed).at([at[a] for a in axes]))

    def _length(self, axes: _Axes, is_needed: bool, who: str) -> Any:
        rows = self.parts(axes, is_needed).equal
        if rows is not None:
            return rows
        key = ("length", who, axes, is_needed)
        return self._once(key, lambda: length(self.rows(axes, is_needed, who)))

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
        before, after = self.rows(have, False, "sender"), self.rows(need, True, "receiver")
        return OnHosts(has, needs, self._sum(shared(after, before)))

    def _summed(self, axes: _Axes, is_needed: bool) -> Any:
        """Return the number of rows of all parts on each host."""
        rows = self.parts(axes, is_needed).equal
        if rows is not None:
            return rows * math.prod([self._near[a] for a in axes])
        key = ("summed", axes, is_needed)
        return self._once(key, lambda: self._sum(self._length(axes, is_needed, "sender")))

    def _sum(self, rows: Any) -> Any:
        """Return the sum over the ranks of each host; a number if all hosts have the same."""
        if not np.ndim(rows):
            return rows
        k = len(self.sizes)
        sums = rows.sum(tuple(range(k, 3 * k)))
        first = sums.item(0)
        return first if sums.size == 1 or (sums == first).all() else sums

    def _of_ranks(self, have: _Axes, need: _Axes) -> OfRanks:
        has_some = self.overlap(have, need)[1] > 0
        return OfRanks(has_some, self._met(have, need, False), self._met(need, have, True))

    def _met(self, axes: _Axes, others: _Axes, is_needed: bool) -> Any:
        """Return the number of parts along `others` that each rank's part overlaps; blocks: all."""
        parts, met = self.parts(axes, is_needed), self.parts(others, not is_needed)
        rows, other = parts.equal, met.equal
        if rows and other and max(rows, other) % min(rows, other) == 0:
            return max(rows // other, 1)  # equal parts: those of one side nest in the other's
        if self.is_blocked:
            return met.count * (length(self.rows(axes, is_needed)) > 0)
        return met.met(self.rows(axes, is_needed))[1]


def _numbers(answer: Any) -> int:
    """Return the count of numbers in a cached answer."""
    if isinstance(answer, np.ndarray):
        return answer.size
    return sum(map(_numbers, answer)) if isinstance(answer, tuple) else 1


@lru_cache(maxsize=64)
def _known(
    sizes: _Axes, near: _Axes, extent: int, cuts: tuple[DimCut | None, DimCut | None]
) -> DimRows:
    return DimRows(sizes, near, extent, cuts)


def dims_of(
    source: Layout, destination: Layout, shape: tuple[int, ...], near: _Axes
) -> tuple[DimRows, ...]:
    """Return the dims of a tensor for two layouts on one mesh."""
    dim_rows, sizes = DimRows if is_symbolic(shape) else _known, source.mesh.shape
    if not source.blocked and not destination.blocked:
        return tuple([dim_rows(sizes, near, extent, (None, None)) for extent in shape])
    return tuple(
        dim_rows(sizes, near, extent, (_cut_of(source, d), _cut_of(destination, d)))
        for d, extent in enumerate(shape)
    )


def _cut_of(layout: Layout, dim: int) -> DimCut | None:
    dim_cut, index = layout.cuts.get(dim), layout.mesh.axes.index
    if dim_cut is None:
        return None
    return DimCut(dim_cut.blocks, frozenset(map(index, dim_cut.plain)))
