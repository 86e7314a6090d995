"""Labels of dims whose rows move: what a slice takes, what is put into zeros, what is joined.

A rank's part of the result then needs the same rows, moved, of the operand: its own, and a halo of
the few rows that a neighbour has.

%x.halo: i64[1,4] of [1,8] (cp=S1, reach(1,7,1,1,1,2)) = alloc
%c0 = post exchange(%x) -> %x.halo i64[1,8] (cp=S1) => (cp=S1, reach(1,7,1,1,1,2))
%y: i64[1,4] of [1,7] (cp=S1) = slice(%x.halo, starts=[0,1], ends=[1,8], steps=[1,1])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdfuse.ir.dims import DimMap, Shape, Shapes, concatenation, window, window_grad
from mdfuse.layouts.halo import Reach


def has_most(rows: Any, extent: Any) -> bool:
    """Return whether some rows are most of a dim, so that most of a rank's rows stay there.

    >>> has_most(7, 8), has_most(4, 8), has_most(8, 8)
    (True, False, False)
    """
    return type(rows) is int and type(extent) is int and 2 * rows > extent > rows


def sliced(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a slice: a dim of which most rows are taken may be split, too."""
    labels, shape = window(shapes, result, attrs), shapes[0] or ()
    reaches = {
        (0, d): _moved(result[d], attrs["starts"][d])
        for d, label in enumerate(labels.result)
        if label is None and attrs["steps"][d] == 1 and has_most(result[d], shape[d])
    }
    return _with_reaches(labels, reaches)


def put_into_zeros(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a slice put into zeros: a dim may be split in it where it makes up most of the rows."""
    labels, shape = window_grad(shapes, result, attrs), shapes[0] or ()
    reaches = {
        (0, d): _moved(result[d], -attrs["starts"][d])
        for d in range(len(shape))
        if attrs["steps"][d] == 1 and has_most(shape[d], result[d])
    }
    shifted = _with_reaches(labels, reaches)
    return replace(shifted, plain=(labels.plain or frozenset()).difference(d for _, d in reaches))


def joined(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a concatenation: the dim may be split where one operand makes up most of its rows."""
    labels, dim = concatenation(shapes, result, attrs), attrs["dim"] % len(result)
    extents = [shape[dim] for shape in shapes if shape is not None]
    if not any(has_most(n, result[dim]) for n in extents):
        return labels
    starts = [sum(extents[:i]) for i in range(len(extents))]
    return _with_reaches(
        labels, {(i, dim): _moved(result[dim], -start) for i, start in enumerate(starts)}
    )


def _moved(of: int, by: int) -> Reach:
    """Return the rows that belong to those of another dim: row i + by to row i."""
    return Reach(of=of, up=1, down=1, first=by, last=by + 1)


def _with_reaches(labels: DimMap, reaches: Mapping[tuple[int, int], Reach]) -> DimMap:
    """Return labels with those of some dims, which are the result's, and their reaches."""
    if not reaches:
        return labels
    dims = {d for _, d in reaches}

    def of(known: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(d if d in dims else label for d, label in enumerate(known))

    operands, results = tuple(map(of, labels.operands)), tuple(map(of, labels.results))
    return replace(labels, operands=operands, results=results, reaches=reaches)
