"""The parts of one dim: the rows of each rank, by coordinates along the axes that split the dim.

This is the one place that knows how a dim is cut. A coordinate is a number for one rank, or an
array for many ranks; answers are numbers or arrays alike. Arrays broadcast with each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from mdfuse.layouts.blocks import Blocks, segments, split
from mdfuse.layouts.boxes import ManyRows, clipped, is_array, nth_chunk
from mdfuse.layouts.halo import Reach
from mdfuse.layouts.stream import Stream


class Parts:
    """The parts of a dim, in the order of the split; immutable.

    Args:
        extent: the extent of the dim.
        sizes: the sizes of the axes that split it, outermost first.
        plain: for each of these axes, whether it splits all blocks as one run of rows.
        blocks: the blocks of the dim; None for one.
        reach: the rows that belong to parts of another dim, if ranks have these.
        chunk: the stream, if each rank has one chunk of its part.

    Attributes:
        count: the number of parts.
        equal: the number of rows of every part; None if parts differ, or have several runs.

    >>> parts = Parts(5, (2, 2), (True, True))
    >>> [rows for _, rows in parts.every()]
    [((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),)]
    >>> parts.number(3), parts.met(((1, 4),)), parts.first, parts.equal
    (2, (0, 3), 2, None)
    """

    def __init__(
        self,
        extent: Any,
        sizes: tuple[int, ...],
        plain: tuple[bool, ...],
        blocks: Blocks | None = None,
        reach: Reach | None = None,
        chunk: Stream | None = None,
    ) -> None:
        self.extent, self.sizes, self.plain = extent, sizes, plain
        self.blocks, self.reach, self.chunk = blocks, reach, chunk
        self.count, self.equal = math.prod(sizes), None
        if blocks is None and reach is None and chunk is None and type(extent) is int:
            self.equal = extent // self.count if extent % self.count == 0 else None

    @cached_property
    def first(self) -> Any:
        """The number of rows of the largest part: the first one but in zigzag order."""
        if self.blocks == "zigzag":
            return self._most
        if self.blocks is not None or self.reach is not None or self.chunk is not None:
            return length(self.at((0,) * len(self.sizes)))
        rows = self.extent
        for n in self.sizes:
            rows = -(-rows // n)
        return rows

    @property
    def _most(self) -> Any:
        """The number of rows of the largest part in zigzag order; that of a middle one.

        Where a run chooses the extent, which part is largest is not to be decided: the last chunk
        of all is the shortest, and the innermost ones are not.
        """
        if type(self.extent) is int:
            return max(length(rows) for _, rows in self.every())
        at = [0 if p else n - 1 for n, p in zip(self.sizes, self.plain, strict=True)]
        return length(self.at(at))

    @property
    def whole(self) -> Parts:
        """The parts of which these are chunks."""
        return Parts(self.extent, self.sizes, self.plain, self.blocks, self.reach)

    def at(self, coordinates: Sequence[Any]) -> ManyRows:
        """Return the rows of the part at some coordinates: one interval for each block."""
        rows, start = self.equal, 0
        if rows is not None:
            number: Any = 0
            for n, i in zip(self.sizes, coordinates, strict=True):
                number = number * n + i
            start = number * rows
            return ((start, start + rows),)
        if self.reach is not None:
            intervals: ManyRows = ((0, self.reach.of),)
        else:
            intervals = segments(self.blocks, self.extent)
        for n, i, is_plain in zip(self.sizes, coordinates, self.plain, strict=True):
            intervals = split(intervals, n, i, is_plain, self.blocks)
        if self.reach is not None:
            intervals = tuple([self.reach.rows(part, self.extent) for part in intervals])
        return intervals if self.chunk is None else self.chunk.part(self.chunk.dim, intervals)

    def every(self) -> Iterator[tuple[tuple[int, ...], ManyRows]]:
        """Yield (coordinates, rows) of all parts."""
        for at in product(*map(range, self.sizes)):
            yield at, self.at(at)

    def number(self, row: Any) -> Any:
        """Return the index of the part that has a row; the dim has neither blocks nor a halo."""
        if not self.sizes:
            return 0
        if self.equal:
            return row // self.equal
        part, number = (0, self.extent), 0
        for n in self.sizes:
            i = (row - part[0]) // -(-(part[1] - part[0]) // n)
            part, number = nth_chunk(part, n, i), number * n + i
        return number

    def met(self, rows: ManyRows) -> tuple[Any, Any]:
        """Return the first part that overlaps some rows, and the number of parts up to the last.

        Parts between them may be empty: `torch.chunk` makes empty parts. A dim in blocks counts as
        overlapping all parts.
        """
        if self.blocks is not None or len(rows) > 1:
            return 0, self.count * (length(rows) > 0)
        ((start, stop),) = rows
        if self.equal == 0:
            return 0, 0 * stop
        if self.reach is not None:
            first, n = self._met_with_halos(start, stop)
            return (first, n) if is_array(stop) else (int(first), int(n))
        last = stop - 1
        if not is_array(last):
            first = self.number(start)
            return first, self.number(last) - first + 1
        first, last = (self.number(clipped(row, self.extent - 1)) for row in (start, last))
        return first, (last - first + 1) * (stop > start)

    def _met_with_halos(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """Return the same for a dim with a halo: of the parts that have rows."""
        import numpy as np

        ends = np.array([part for _, (part,) in self.every()])
        numbers = np.flatnonzero(ends[:, 0] < ends[:, 1])
        if not len(numbers):
            return 0, 0 * stop
        begins, ends = ends[numbers].T
        first = np.minimum(np.searchsorted(ends, start, "right"), len(numbers) - 1)
        last = np.searchsorted(begins, stop - 1, "right") - 1
        is_met = (stop > start) & (begins[first] < stop) & (start < ends[last])
        return numbers[first], (numbers[last] - numbers[first] + 1) * is_met


def length(rows: ManyRows) -> Any:
    """Return the number of rows of a part."""
    return sum([stop - start for start, stop in rows])


def shared(rows: ManyRows, others: ManyRows) -> Any:
    """Return the number of rows that two parts have in common; arrays."""
    import numpy as np

    return sum(
        np.maximum(np.minimum(stop, last) - np.maximum(start, first), 0)
        for start, stop in rows
        for first, last in others
    )
