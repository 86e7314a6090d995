"""Splits of one dim by several axes: torch's way, from left to right, and a layout's way.

Torch applies placements in the order of the mesh. `_StridedShard` with a split factor k cuts the
part left by the axes on its left into k equal blocks, and splits each. So an index of a dim is a
mixed-radix number: an axis owns one digit, and the digits without an axis count the elements that a
rank has. `Shard` takes the first digit that no axis has, `_StridedShard` the first behind k of
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mdfuse.layouts.layout import Layout


class Split(NamedTuple):
    """A split of one dim of a layout by axes.

    Attributes:
        order: the axes, outermost first.
        blocks: the number of blocks of the dim; None: there are none.
        plain: the axes that split it plainly.
    """

    order: tuple[str, ...]
    blocks: int | None
    plain: frozenset[str]


class _MeshDigit(NamedTuple):
    size: int
    axis: str | None = None


def from_torch(axes: Sequence[tuple[str, int, int]], extent: int) -> Split | None:
    """Return a layout's split of a dim that equals torch's placements; None where none does.

    Args:
        axes: name, size, and split factor of each that splits the dim, in the order of the mesh.
        extent: of the dim.

    >>> from_torch([("dp", 2, 2), ("tp", 2, 1)], 8).order  # FSDP over tensor parallelism
    ('tp', 'dp')
    """
    digits, tail = list[_MeshDigit](), list[str]()
    for axis, n, factor in axes:
        extended = None if tail else _taken(digits, axis, n, factor)
        if extended is not None:
            digits = extended
        elif factor == 1:
            tail.append(axis)
        else:
            return None
    while digits and digits[-1].axis is None:
        digits.pop()
    if extent % math.prod(d.size for d in digits[:-1]):
        return None
    free = [i for i, d in enumerate(digits) if d.axis is None]
    first, last = (free[0], free[-1] + 1) if free else (len(digits), len(digits))
    if len(free) < last - first:
        return None
    order = [d.axis for d in digits if d.axis is not None]
    blocks = math.prod(d.size for d in digits[:last]) if free else None
    return Split((*order, *tail), blocks, frozenset([*order[:first], *tail]))


def _taken(digits: Sequence[_MeshDigit], axis: str, n: int, factor: int) -> list[_MeshDigit] | None:
    """Return the digits of a dim with one more that an axis owns; None where it cuts through."""
    taken = list[_MeshDigit]()
    left, is_owned = factor, False
    for d in digits:
        if d.axis is not None or is_owned:
            taken.append(d)
        elif left % d.size == 0:
            taken.append(d)
            left //= d.size
        elif d.size % (left * n) == 0:
            taken += [_MeshDigit(left), _MeshDigit(n, axis), _MeshDigit(d.size // (left * n))]
            is_owned = True
        else:
            return None
    if not is_owned:
        taken += [_MeshDigit(left), _MeshDigit(n, axis)]
    return [d for d in taken if d.size > 1 or d.axis is not None]


def to_torch(layout: Layout, dim: int, extent: int | None = None) -> Mapping[str, int] | None:
    """Return the split factors with which torch splits a dim as a layout does; None: it cannot.

    Args:
        layout: a normalized layout.
        dim: which of its dims.
        extent: of the dim; None: it is assumed to fall into equal parts.

    >>> from mdfuse import DeviceMesh, Shard
    >>> mesh, fsdp = DeviceMesh.arange(dp=2, tp=4), {"dp": Shard(0), "tp": Shard(0)}
    >>> to_torch(Layout(mesh, fsdp, {0: ("tp", "dp")}), 0)
    {'dp': 4, 'tp': 1}
    """
    axes, size = layout.split_axes(dim), layout.mesh.axis_size
    cut = layout.cuts.get(dim)
    if cut is not None and not isinstance(cut.blocks, int):
        return None
    digits, tail = [_MeshDigit(size(a), a) for a in axes], list[str]()
    if cut is not None:
        at = next(i for i, a in enumerate(axes) if a not in cut.plain)
        tail = [a for a in axes[at:] if a in cut.plain]
        whole = _MeshDigit(cut.blocks // math.prod(d.size for d in digits[:at]))  # type: ignore[operator]
        digits = [*digits[:at], whole, *(d for d in digits[at:] if d.axis not in tail)]
    place = layout.mesh.axis_index
    if [*axes[len(axes) - len(tail) :]] != tail or tail != sorted(tail, key=place):
        return None
    if tail and any(place(a) > place(tail[0]) for a in axes if a not in tail):
        return None
    factors = {}
    for a in sorted(axes, key=place):
        before = digits[: next((i for i, d in enumerate(digits) if d.axis == a), 0)]
        later = (d.size for d in before if d.axis is None or place(d.axis) > place(a))
        factors[a] = math.prod(later)
    is_even = extent is None or extent % math.prod(d.size for d in digits[:-1]) == 0
    return factors if is_even or {*factors.values()} == {1} else None
