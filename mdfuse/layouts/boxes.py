"""Boxes: parts of a tensor, one interval per dim."""

from __future__ import annotations

import math

from mdfuse.extents.extent import smaller

#: A half-open range of indices along one dim.
Interval = tuple[int, int]
#: One interval per dim: a part of a tensor.
Box = tuple[Interval, ...]


def nth_chunk(interval: Interval, parts: int, i: int) -> Interval:
    """Return the i-th chunk that `torch.chunk` makes of an interval; empty where it makes fewer.

    >>> [nth_chunk((0, 5), 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    start, stop = interval
    length = -(-(stop - start) // parts)
    if type(length) is not int:  # symbolic: which number is smaller is not to be decided
        begin = smaller(start + i * length, stop)
        return begin, smaller(begin + length, stop)
    begin = min(start + i * length, stop)
    return begin, min(begin + length, stop)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the extents of a box."""
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None where it is empty."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def relative(box: Box, to: Box) -> Box:
    """Return a box in coordinates relative to a box that contains it."""
    return tuple((s - t, e - t) for (s, e), (t, _) in zip(box, to, strict=True))
