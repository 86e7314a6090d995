"""Parts of parts: which of them a view shows."""

from __future__ import annotations

from mdfuse.layouts.blocks import run
from mdfuse.layouts.boxes import Rows
from mdfuse.layouts.dim_parts import length
from mdfuse.layouts.layout import Layout


def is_view_of(outer: Layout, inner: Layout, shape: tuple[int, ...], rank: int) -> bool:
    """Return whether a view of a rank's part in one layout is its part in another.

    In blocks, or in zigzag order, rows are counted from the first one of a part, so that a view
    shows the first rows.

    >>> from mdfuse import DeviceMesh, Shard
    >>> mesh = DeviceMesh.arange(a=2)
    >>> whole, zigzag = Layout(mesh), Layout(mesh, {"a": Shard(0, zigzag=True)})
    >>> halves = Layout(mesh, {"a": Shard(0)})
    >>> is_view_of(whole, halves, (8,), 1), is_view_of(whole, zigzag, (8,), 1)
    (True, False)
    """
    rows = inner.rows(shape, rank)
    if not all(map(length, rows)):
        return True
    return all(
        _is_first(of, part) if _counts_from_0(outer, inner, d) else _is_one_run(of, part)
        for d, (of, part) in enumerate(zip(outer.rows(shape, rank), rows, strict=True))
    )


def _counts_from_0(outer: Layout, inner: Layout, dim: int) -> bool:
    return dim in inner.blocked and (dim in outer.blocked or not outer.split_axes(dim))


def _is_one_run(of: Rows, rows: Rows) -> bool:
    """Return whether rows of a dim are one run of those that a rank has."""
    if rows == of:
        return True
    (x, y), *others = [piece for piece in rows if piece[0] < piece[1]]
    return not others and any(a <= x and y <= b for a, b in of) and len(of) == len(rows) == 1


def _is_first(of: Rows, rows: Rows) -> bool:
    """Return whether rows of a dim are the first of those that a rank has."""
    return _joined(run(of, (0, length(rows)))) == _joined(rows)


def _joined(rows: Rows) -> list[list[int]]:
    """Return runs of rows, those that follow each other as one, without empty ones."""
    runs = list[list[int]]()
    for start, stop in rows:
        if runs and runs[-1][1] == start:
            runs[-1][1] = stop
        elif start < stop:
            runs.append([start, stop])
    return runs
