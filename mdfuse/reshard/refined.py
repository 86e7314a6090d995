"""Meshes over the same ranks, refined to a common one.

(2, 4) and (4, 2) are both (2, 2, 2); a flattened mesh, a transposed one, and one with other names
are the mesh itself. A change between the two layouts is then a change on one mesh.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mdfuse.layouts.blocks import segments
from mdfuse.layouts.hosts import hosts_by_rank
from mdfuse.layouts.layout import Layout, Placement
from mdfuse.mesh import DeviceMesh


class _Digit(NamedTuple):
    """A part of an axis: neighbours along it are `stride` apart in the order of a mesh's ranks."""

    stride: int
    size: int


def on_common_mesh(
    source: Layout, destination: Layout, shape: tuple[int, ...]
) -> tuple[Layout, Layout] | None:
    """Return two layouts on their common mesh; None if they have none.

    >>> from mdfuse.layouts.layout import Shard
    >>> one, other = DeviceMesh.arange(a=2, b=4), DeviceMesh.arange(p=4, q=2)
    >>> on_common_mesh(Layout(one, {"b": Shard(0)}), Layout(other, {"p": Shard(1)}), (8, 8))
    ((a=R, b0=S0, b1=S0), (a=S1, b0=S1, b1=R))
    """
    if source.stream or destination.stream:
        return None
    common = _common_mesh(source.mesh, destination.mesh)
    if common is None:
        return None
    mesh, *axes = common
    layouts = [
        _refined(x, mesh, of, shape) for x, of in zip((source, destination), axes, strict=True)
    ]
    return (layouts[0], layouts[1]) if layouts[0] is not None and layouts[1] is not None else None


@lru_cache(maxsize=256)
def _common_mesh(
    one: DeviceMesh, other: DeviceMesh
) -> tuple[DeviceMesh, list[list[str]], list[list[str]]] | None:
    """Return the common mesh, and for each axis of both meshes the names of its common axes."""
    if one.size != other.size or one.size == 1 or other.first not in one:
        return None
    places = [one.position(r) for r in other.ranks]
    if None in places:
        return None
    axes, own_axes = _axes_of(np.array(places), other), _axes_of(np.arange(one.size), one)
    if axes is None or own_axes is None:
        return None
    digits = [d for axis_digits in (*own_axes, *axes) for d in axis_digits]
    cuts = sorted({1, *(d.stride for d in digits), *(d.stride * d.size for d in digits)})
    if any(high % low for low, high in pairwise(cuts)):
        return None
    pieces = [_Digit(low, high // low) for low, high in pairwise(cuts)][::-1]
    names = _names(one, own_axes, pieces)
    hosts = one.hosts if hosts_by_rank(one, other) is not None else None
    mesh = DeviceMesh.of(tuple(d.size for d in pieces), one.ranks, tuple(names.values()), hosts)
    of = [[_within(pieces, x, names) for x in digits] for digits in (own_axes, axes)]
    return one if mesh == one else mesh, of[0], of[1]


def _axes_of(places: np.ndarray, mesh: DeviceMesh) -> list[list[_Digit]] | None:
    """Return each axis of a mesh as digits, the outermost first.

    Args:
        places: the positions of its ranks in the order of the other mesh, in its own order.
        mesh: the mesh.
    """
    grid = places.reshape(mesh.shape)
    first, axes = int(places[0]), list[list[_Digit]]()
    total = np.full(mesh.shape, first)
    for axis, n in enumerate(mesh.shape):
        line = np.moveaxis(grid, axis, 0).reshape(n, -1)[:, 0] - first
        digits, step = list[_Digit](), 1
        while step < n:
            size = 2
            while (size + 1) * step <= n and line[size * step] == size * line[step]:
                size += 1
            while n % (step * size):
                size -= 1
            if size < 2 or line[step] < 1:
                return None
            digits.append(_Digit(int(line[step]), size))
            step *= size
        axes.append(digits[::-1])
        shown, at = np.zeros(n, int), np.arange(n)
        for d in digits:
            shown, at = shown + at % d.size * d.stride, at // d.size
        total = total + shown.reshape([-1 if a == axis else 1 for a in range(mesh.ndim)])
    return axes if first == 0 and bool((total == grid).all()) else None


def _names(
    mesh: DeviceMesh, of_axes: list[list[_Digit]], pieces: list[_Digit]
) -> dict[_Digit, str]:
    """Return a name for each piece: that of the axis, with a number where it has several."""
    names, used = dict[_Digit, str](), {*mesh.axes}
    for axis, digits in zip(mesh.axes, of_axes, strict=True):
        inside = [p for d in digits for p in pieces if _is_within(p, d)]
        for i, piece in enumerate(inside):
            name = axis if len(inside) == 1 else f"{axis}{i}"
            while len(inside) > 1 and name in used:
                name += "_"
            used.add(name)
            names[piece] = name
    return names


def _is_within(piece: _Digit, digit: _Digit) -> bool:
    return digit.stride <= piece.stride < digit.stride * digit.size


def _within(pieces: list[_Digit], digits: list[_Digit], names: dict[_Digit, str]) -> list[str]:
    """Return the names of the pieces of some digits, outermost first."""
    return [names[p] for d in digits for p in pieces if _is_within(p, d)]


def _refined(
    layout: Layout, mesh: DeviceMesh, axes: list[list[str]], shape: tuple[int, ...]
) -> Layout | None:
    """Return a layout on the refined mesh; None if its parts would differ there."""
    placements, pieces = dict[str, Placement](), dict(zip(layout.mesh.axes, axes, strict=True))
    for axis, placement in layout.by_axis().items():
        placements.update(dict.fromkeys(pieces[axis], placement))
    order = {d: [a for axis in split for a in pieces[axis]] for d, split in layout.splits}
    for dim, split in layout.splits:
        pieces_of = layout.blocked.get(dim)
        parts = math.prod(map(layout.mesh.axis_size, split)) * (1 + (pieces_of == "zigzag"))
        blocks = segments(pieces_of, shape[dim])
        is_uneven = any((stop - start) % parts for start, stop in blocks)
        is_uneven = is_uneven or (dim in layout.cuts and bool(layout.cuts[dim].plain))
        if any(len(pieces[a]) > 1 for a in split) and is_uneven:
            return None  # a part of uneven parts is cut elsewhere
    return Layout(mesh, placements, {d: a for d, a in order.items() if a})
