"""One endpoint of an exchange: the parts of the tensor, and the ranks that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any

from mdfuse.layouts.blocks import segments, split
from mdfuse.layouts.boxes import Rows, meet, nth_chunk
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh

#: axis -> coordinate
At = Mapping[str, int]


@dataclass(frozen=True)
class Side:
    """The source or the destination of an exchange: the parts, and the ranks that hold them."""

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
        """The axes along which ranks hold copies."""
        return tuple(a for a in self.mesh.axes if a not in self.fixed)

    @cached_property
    def grid(self) -> Any:
        """The ranks: an array with the axes of the mesh."""
        return self.mesh.array.reshape(self.mesh.shape)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis."""
        return dict(zip(self.mesh.axes, self.mesh.shape, strict=True))

    @cached_property
    def split(self) -> tuple[tuple[str, ...], ...]:
        """The axes that split each dim, outermost first."""
        return tuple(map(self.layout.split_axes, range(len(self.shape))))

    @cached_property
    def split_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the axes that split each dim, outermost first."""
        return tuple([tuple([self.sizes[a] for a in axes]) for axes in self.split])

    @cached_property
    def strides(self) -> dict[str, int]:
        """Axis -> the distance between neighbours along it in the order of the mesh."""
        sizes = accumulate(reversed(self.mesh.shape[1:]), mul, initial=1)
        return dict(zip(reversed(self.mesh.axes), sizes, strict=True))

    def count(self, axes: tuple[str, ...]) -> int:
        return math.prod([self.sizes[a] for a in axes])

    def at(self, rank: int) -> At | None:
        """Return the coordinates of a rank; None where it is not in the mesh."""
        coordinate = self.mesh.coordinate(rank)
        return None if coordinate is None else dict(zip(self.mesh.axes, coordinate, strict=True))

    def rank(self, at: At) -> int:
        return self.mesh.rank_at([at[a] for a in self.mesh.axes])

    def number(self, at: At, axes: tuple[str, ...]) -> int:
        """Return the row-major index of coordinates along some axes."""
        n, sizes = 0, self.sizes
        for a in axes:
            n = n * sizes[a] + at[a]
        return n

    def place(self, n: int, axes: tuple[str, ...]) -> int:
        """Return the offset, in the order of the mesh, of a row-major index along some axes."""
        strides = self.strides
        if len(axes) == 1:
            return n * strides[axes[0]]
        place = 0
        for a in reversed(axes):
            n, i = divmod(n, self.sizes[a])
            place += i * strides[a]
        return place

    def numbered(self, n: int, axes: tuple[str, ...]) -> dict[str, int]:
        """Return the coordinates of a row-major index along some axes."""
        if len(axes) == 1:
            return {axes[0]: n}
        at = {}
        for a in reversed(axes):
            n, at[a] = divmod(n, self.sizes[a])
        return at

    def rows(self, at: At) -> tuple[Rows, ...]:
        """Return the rows at some coordinates; the axes that split dims suffice."""
        return tuple([self.rows_of(dim, at) for dim in range(len(self.split))])

    def rows_of(self, dim: int, at: At) -> Rows:
        """Return the rows of one dim."""
        key = (dim, *[at[a] for a in self.split[dim]])
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = self._part(*key)
        return rows

    @cached_property
    def _rows(self) -> dict[tuple[int, ...], Rows]:
        """(dim, coordinates on the axes that split it) -> its rows."""
        return {}

    @cached_property
    def _plain(self) -> dict[int, int]:
        """Dim that one axis splits, without blocks, halos and chunks -> rows per part."""
        chunk = self.layout.stream
        chunked = chunk.dim if chunk is not None and chunk.index is not None else None
        return {
            dim: -(-self.shape[dim] // self.sizes[axes[0]])
            for dim, axes in enumerate(self.split)
            if len(axes) == 1 and dim != chunked
            if dim not in self.layout.blocked and self.layout.reach(dim) is None
        }

    def _part(self, dim: int, *at: int) -> Rows:
        if dim in self._plain:
            return (nth_chunk((0, self.shape[dim]), self.sizes[self.split[dim][0]], *at),)
        reach, extent = self.layout.reach(dim), self.shape[dim]
        rows = segments(self.layout.blocked.get(dim), extent) if reach is None else ((0, reach.of),)
        for axis, i in zip(self.split[dim], at, strict=True):
            rows = split(rows, self.sizes[axis], i, self.layout.is_plain(dim, axis))
        rows = rows if reach is None else tuple(reach.rows(part, extent) for part in rows)
        chunk = self.layout.stream
        if chunk is not None and chunk.index is not None and chunk.dim == dim:
            i = chunk.index if isinstance(chunk.index, int) else chunk.largest
            rows = chunk.rows(rows, i)
        return rows

    def positions(self, dim: int, rows: Rows) -> range:
        """Return the range of part indices of a dim that covers some of its rows.

        Parts in this range may be empty: `torch.chunk` makes empty parts, also between others. If
        either endpoint has the dim in blocks, the range covers all parts.
        """
        if dim in self._plain and len(rows) == 1:
            ((start, stop),), size = rows, self._plain[dim]
            return range(start // size, (stop - 1) // size + 1)
        reach = self.layout.reach(dim)
        is_alone = not self.split[dim] and reach is None
        if is_alone or dim in self.layout.blocked or len(rows) > 1:
            return range(self.count(self.split[dim]))
        ((start, stop),) = rows
        if reach is not None:
            parts = enumerate(self.layout.chunks_of(dim, self.shape[dim]))
            positions = [n for n, (_, (a, b)) in parts if max(a, start) < min(b, stop)]
            return range(positions[0], positions[-1] + 1) if positions else range(0)
        return range(self._position(dim, start), self._position(dim, stop - 1) + 1)

    def _position(self, dim: int, row: int) -> int:
        """Return the index of the part of a dim that contains a row."""
        interval, position = (0, self.shape[dim]), 0
        for axis in self.split[dim]:
            n = self.sizes[axis]
            i = (row - interval[0]) // -(-(interval[1] - interval[0]) // n)
            interval, position = nth_chunk(interval, n, i), position * n + i
        return position

    def meeting(self, dim: int, rows: Rows) -> Iterator[tuple[dict[str, int], Rows, Rows]]:
        """Yield (coordinates, rows of the part, overlap) for each part that overlaps some rows."""
        axes, is_plain = self.split[dim], dim in self._plain
        for n in self.positions(dim, rows):
            at = self.numbered(n, axes) if axes else {}
            part = self._part(dim, n) if is_plain else self.rows_of(dim, at)
            both = meet(part, rows)
            if both:
                yield at, part, both
