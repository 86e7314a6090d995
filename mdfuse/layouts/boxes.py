"""Boxes: parts of a tensor, one interval per dim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Any

from mdfuse.extents.extent import smaller

#: A half-open range of indices along one dim.
Interval = tuple[int, int]
#: One interval per dim: a part of a tensor.
Box = tuple[Interval, ...]
#: A part of a tensor: boxes of it, each with where that lies in the part.
Boxes = tuple[tuple[Box, Box], ...]
#: The rows of a dim that a rank holds, in order: one interval for each block of the dim.
Rows = tuple[Interval, ...]
#: The rows of a dim that one rank holds, or many ranks: numbers may be arrays.
ManyRows = tuple[tuple[Any, Any], ...]


def is_dim(x: object) -> bool:
    """Return whether x may be the number of a dim: an integer of 64 bits, from either end."""
    return isinstance(x, int) and not isinstance(x, bool) and -(1 << 63) <= x < 1 << 63


def is_array(x: object) -> bool:
    """Return whether numbers are those of many ranks; numpy is imported where these are made."""
    return hasattr(x, "dtype")


def nth_chunk(interval: tuple[Any, Any], parts: int, i: Any) -> tuple[Any, Any]:
    """Return the i-th chunk that `torch.chunk` makes of an interval; empty where it makes fewer.

    Numbers may be arrays.

    >>> [nth_chunk((0, 5), 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    start, stop = interval
    length = -(-(stop - start) // parts)
    begin = start + i * length
    if is_array(begin):
        begin = begin.clip(max=stop)
        return begin, (begin + length).clip(max=stop)
    if type(length) is not int:  # symbolic: which number is smaller is not to be decided
        begin = smaller(begin, stop)
        return begin, smaller(begin + length, stop)
    begin = min(begin, stop)
    return begin, min(begin + length, stop)


def clipped(row: Any, extent: Any) -> Any:
    """Return a row, or the nearest one between 0 and an extent; numbers may be arrays."""
    if is_array(row) or is_array(extent):
        return (row + 0 * extent).clip(0, extent)
    return min(max(row, 0), extent)


def boxes_of(rows: Sequence[Rows]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes that rows of all dims make up, and where each lies in a rank's part.

    >>> list(boxes_of([((0, 2), (4, 6)), ((0, 3),)]))
    [(((0, 2), (0, 3)), ((0, 2), (0, 3))), (((4, 6), (0, 3)), ((2, 4), (0, 3)))]
    """
    dims = []
    for pieces in rows:
        ends = [0, *accumulate(stop - start for start, stop in pieces)]
        places = zip(pieces, pairwise(ends), strict=True)
        # an empty dim has one empty interval, so that the other dims' boxes are still told
        dims.append([p for p in places if p[0][0] < p[0][1]] or [(pieces[0], (0, 0))])
    for choice in product(*dims):
        yield tuple(held for held, _ in choice), tuple(place for _, place in choice)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the extents of a box."""
    return tuple(stop - start for start, stop in box)


def runs_of(ends: Sequence[int]) -> Rows:
    """Return runs of rows of a dim, by the ends of all.

    >>> runs_of((0, 2, 6, 8))
    ((0, 2), (6, 8))
    """
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def runs_shape(box: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the extents of a box whose dims may have several runs of rows."""
    if all(len(ends) == 2 for ends in box):
        return tuple(stop - start for start, stop in box)
    return tuple([sum(stop - start for start, stop in runs_of(ends)) for ends in box])


def box_size(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def index_of(box: Box) -> tuple[slice, ...]:
    """Return a box as an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None where it is empty."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def has_rows(rows: Rows) -> bool:
    """Return whether some of the intervals has rows."""
    return any(start < stop for start, stop in rows)


def common(rows: Sequence[Rows], others: Sequence[Rows]) -> list[Box]:
    """Return the boxes of what two parts of a tensor have in common, in order.

    >>> common([((0, 2), (4, 6))], [((1, 5),)])
    [((1, 2),), ((4, 5),)]
    """
    return [*product(*map(meet, rows, others))]


def meet(rows: Rows, others: Rows) -> Rows:
    """Return what two parts of a dim have in common, in order."""
    if len(rows) == len(others) == 1:
        ((p, q),), ((r, s),) = rows, others
        start, stop = r if r > p else p, s if s < q else q  # quicker than max and min
        return ((start, stop),) if start < stop else ()
    both = ((max(p, r), min(q, s)) for p, q in rows for r, s in others)
    return tuple((start, stop) for start, stop in both if start < stop)


def within(box: Box, rows: Sequence[Rows]) -> Box:
    """Return where a box lies in a part of a tensor, in whose rows it is.

    >>> within(((5, 6), (1, 3)), [((0, 2), (4, 6)), ((1, 3),)])
    ((3, 4), (0, 2))
    """
    return tuple([_within(interval, pieces) for interval, pieces in zip(box, rows, strict=True)])


def _within(interval: Interval, pieces: Rows) -> Interval:
    before, (start, _) = 0, pieces[0]
    if len(pieces) == 1:
        return interval[0] - start, interval[1] - start
    for start, stop in pieces:
        if start <= interval[0] and interval[1] <= stop:
            break
        before += stop - start
    return before + interval[0] - start, before + interval[1] - start


def relative(box: Box, to: Box) -> Box:
    """Return a box in coordinates relative to a box that contains it."""
    return tuple((s - t, e - t) for (s, e), (t, _) in zip(box, to, strict=True))
