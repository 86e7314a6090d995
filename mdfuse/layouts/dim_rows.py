"""One dim of a tensor on a mesh: the rows of ranks, by the axes that split it.

Axes are numbers here. An array has one axis per mesh axis, of size 1 if its content does not depend
on it, so that few numbers describe all ranks. Lengths of equal parts are plain numbers.
"""

from __future__ import annotations

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


class DimRows:
    """The rows of a dim before and after an exchange on one mesh.

    Args:
        sizes: the sizes of the mesh axes.
        extent: the extent of the dim, a number.
        cuts: the cuts before and afterwards; None where the dim is not in blocks.
    """

    def __init__(
        self, sizes: _Axes, extent: int, cuts: tuple[DimCut | None, DimCut | None]
    ) -> None:
        self.sizes, self.extent, self.cuts = sizes, extent, cuts
        self._parts: dict[tuple[_Axes, bool], Parts] = {}
        self._known: dict[tuple[Any, ...], Any] = {}
        self._count = 0  # of cached numbers

    @cached_property
    def _at(self) -> Any:
        """Coordinates of each rank."""
        return np.ogrid[tuple(map(slice, self.sizes))]

    def overlap(self, have: _Axes, need: _Axes) -> tuple[Any, Any]:
        """Return the number of rows that each rank needs, and the number of these that it has."""
        return self._once(("overlap", have, need), lambda: self._overlap(have, need))

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

    def rows(self, axes: _Axes, is_needed: bool = False) -> ManyRows:
        """Return (start, stop) of each rank's part in each block: arrays."""
        key = (axes, is_needed)
        return self._once(key, lambda: self.parts(axes, is_needed).at([self._at[a] for a in axes]))

    def _length(self, axes: _Axes, is_needed: bool) -> Any:
        rows = self.parts(axes, is_needed).equal
        if rows is not None:
            return rows
        key = ("length", axes, is_needed)
        return self._once(key, lambda: length(self.rows(axes, is_needed)))

    def _within(self, have: _Axes, need: _Axes) -> bool | None:
        """Return True if destination parts nest in source parts, False for the converse, or None.

        They nest if the axes that split the dim before are the outermost ones afterwards.
        """
        is_alike = self.cuts[0] == self.cuts[1]
        if not have or (is_alike and need[: len(have)] == have):
            return True
        return False if not need or (is_alike and have[: len(need)] == need) else None

    def _overlap(self, have: _Axes, need: _Axes) -> tuple[Any, Any]:
        rows, is_within = self._length(need, True), self._within(have, need)
        if is_within is not None:
            return rows, rows if is_within else self._length(have, False)
        return rows, shared(self.rows(need, True), self.rows(have))


def _numbers(answer: Any) -> int:
    """Return the count of numbers in a cached answer."""
    if isinstance(answer, np.ndarray):
        return answer.size
    return sum(map(_numbers, answer)) if isinstance(answer, tuple) else 1


@lru_cache(maxsize=64)
def _known(sizes: _Axes, extent: int, cuts: tuple[DimCut | None, DimCut | None]) -> DimRows:
    return DimRows(sizes, extent, cuts)


def dims_of(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[DimRows, ...]:
    """Return the dims of a tensor for two layouts on one mesh."""
    dim_rows, sizes = DimRows if is_symbolic(shape) else _known, source.mesh.shape
    if not source.blocked and not destination.blocked:
        return tuple([dim_rows(sizes, extent, (None, None)) for extent in shape])
    return tuple(
        dim_rows(sizes, extent, (_cut_of(source, d), _cut_of(destination, d)))
        for d, extent in enumerate(shape)
    )


def _cut_of(layout: Layout, dim: int) -> DimCut | None:
    dim_cut, index = layout.cuts.get(dim), layout.mesh.axes.index
    if dim_cut is None:
        return None
    return DimCut(dim_cut.blocks, frozenset(map(index, dim_cut.plain)))
