"""Sets of ranks, those whose terms a buffer holds, as the bits of one integer.

A bit is a place along the axes of a mesh along which some buffer is Partial. A set is moved, joined
and compared by one operation on integers, for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mdfuse.hir.program import HostProgram
from mdfuse.layouts.layout import Layout, Partial
from mdfuse.mesh import DeviceMesh

#: How many ranks an error names.
_NAMED = 8


@dataclass(frozen=True)
class Space:
    """The places along some axes of a mesh.

    Attributes:
        mesh: the mesh.
        axes: those along which something is Partial, outermost first.
    """

    mesh: DeviceMesh
    axes: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(self.mesh.axis_size, self.axes))

    def size(self, axis: str) -> int:
        return self.mesh.axis_size(axis)

    @property
    def full(self) -> int:
        """The places of all ranks."""
        return int((1 << math.prod(self.sizes)) - 1)

    def place(self, axis: str, rank: int) -> int:
        coordinate = self.mesh.coordinate(rank)
        assert coordinate is not None
        return coordinate[self.mesh.axis_index(axis)]

    def lanes(self, axis: str, start: int, stop: int) -> int:
        """Return the places from `start` to `stop` along an axis, all of them along others."""
        return _lanes(self.sizes, self.axes.index(axis), start, stop)

    def places_of(self, axes: Iterable[str], rank: int) -> int:
        """Return the places of a rank along some axes, all of them along others."""
        places = self.full
        for axis in axes:
            if axis in self.axes:
                at = self.place(axis, rank)
                places &= self.lanes(axis, at, at + 1)
        return places

    def usual(self, layout: Layout, rank: int) -> int:
        """Return the terms that a rank holds by a layout: its own, and all along other axes."""
        places = layout.by_axis()
        return self.places_of((a for a in self.axes if isinstance(places[a], Partial)), rank)

    def agree(self, layout: Layout, held: int, rank: int) -> bool:
        """Return whether terms are a rank's own along all axes along which a layout is Partial."""
        return not held & ~self.usual(layout, rank)

    def turned(self, held: int, axis: str, far: int) -> int:
        """Return places moved by a distance along an axis, which is a ring."""
        n, at = self.size(axis), self.axes.index(axis)
        far %= n
        if not far:
            return held
        stride = math.prod(self.sizes[at + 1 :])
        low = self.lanes(axis, 0, n - far)
        return ((held & low) << (far * stride)) | ((held & ~low) >> ((n - far) * stride))

    def swept(self, held: int, axis: str, far: int, step: int, count: int) -> int:
        """Return the union of `count` moves along an axis: by `far`, `far + step`, …"""
        n, places = self.size(axis), held
        if step % n in (1, n - 1):  # places side by side: each round doubles them
            sign, done = (1 if step % n == 1 else -1), 1
            while done < count:
                doubled = min(done, count - done)
                places |= self.turned(places, axis, sign * doubled)
                done += doubled
        else:
            for k in range(1, count):
                places |= self.turned(held, axis, step * k)
        return self.turned(places, axis, far)

    def filled(self, held: int, axis: str) -> int:
        """Return all places of each line along an axis that has a held place."""
        return self.swept(held, axis, 0, 1, self.size(axis))

    def put(self, held: int, axis: str, rank: int) -> int:
        """Return places moved to that of a rank along an axis."""
        at = self.place(axis, rank)
        return self.filled(held, axis) & self.lanes(axis, at, at + 1)

    def ranks(self, held: int, rank: int) -> list[int]:
        """Return the first ranks at some places; other axes have the coordinates of a rank."""
        coordinate = self.mesh.coordinate(rank)
        assert coordinate is not None
        ranks: list[int] = []
        while held and len(ranks) <= _NAMED:
            place = (held & -held).bit_length() - 1
            held &= held - 1
            there = list(coordinate)
            for axis, n in zip(reversed(self.axes), reversed(self.sizes), strict=True):
                place, there[self.mesh.axis_index(axis)] = divmod(place, n)
            ranks.append(self.mesh.rank_at(there))
        return ranks


@lru_cache(maxsize=1024)
def _lanes(sizes: tuple[int, ...], at: int, start: int, stop: int) -> int:
    stride, n = math.prod(sizes[at + 1 :]), sizes[at]
    period, blocks = n * stride, math.prod(sizes[:at])
    every = ((1 << (period * blocks)) - 1) // ((1 << period) - 1)  # a bit where each block begins
    return int((((1 << ((stop - start) * stride)) - 1) << (start * stride)) * every)


def spaces_of(program: HostProgram) -> Mapping[DeviceMesh, Space]:
    """Return each mesh of a program -> its space."""
    axes: dict[DeviceMesh, dict[str, None]] = {}
    layouts = {id(k.layout): k.layout for k in program.types.values() if k.layout is not None}
    for layout in layouts.values():
        axes.setdefault(layout.mesh, {}).update(dict.fromkeys(layout.partial_axes))
    return {
        mesh: Space(mesh, tuple(a for a in mesh.axes if a in some and mesh.axis_size(a) > 1))
        for mesh, some in axes.items()
    }
