"""One endpoint of an exchange: the parts of the tensor, and the ranks that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mdfuse.layouts.boxes import Rows, meet
from mdfuse.layouts.dim_parts import Parts
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
        return self.parts[dim].at([at[a] for a in self.split[dim]])

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """The parts of each dim."""
        return tuple(map(self.layout.parts, range(len(self.shape)), self.shape))

    def meeting(self, dim: int, rows: Rows) -> Iterator[tuple[dict[str, int], Rows, Rows]]:
        """Yield (coordinates, rows of the part, overlap) for each part that overlaps some rows."""
        first, n = self.parts[dim].met(rows)
        for number in range(first, first + n):
            at = self.numbered(number, self.split[dim])
            part = self.rows_of(dim, at)
            both = meet(part, rows)
            if both:
                yield at, part, both
