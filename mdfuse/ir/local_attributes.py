"""Turn an op's attributes into those for one rank's part of it, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mdfuse.ir import dims
from mdfuse.ir.shifts import has_most
from mdfuse.layouts.blocks import Cut, as_blocks
from mdfuse.layouts.boxes import Box, Interval, Rows, box_shape

#: Each block of a dim, and what a rank has of it.
Pieces = tuple[tuple[Interval, Interval], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExprPart:
    """A rank's parts of an expression's operands and result.

    Attributes:
        shapes: global shapes of the operands; None for those that are not tensors.
        boxes: this rank's parts of the operands.
        shape: global shape of the result.
        box: this rank's part of the result.
        blocks: dim of the first operand that is in blocks -> each block, and what the rank has of
            it; its boxes count such dims from 0.
        cuts: dim of the result that is in blocks -> these.
        runs: dim of the result that is in blocks -> the rows that the rank has of it.
        moved: dim of the first operand of which the rank has just the rows that it needs -> by how
            many rows these lie behind those of the result.
        pieces: dim of an operand that is in blocks -> the rows that the rank has of it, for each.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    boxes: tuple[Box | None, ...]
    shape: tuple[int, ...]
    box: Box
    blocks: Mapping[int, Pieces] = field(default_factory=dict)
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    runs: Mapping[int, Rows] = field(default_factory=dict)
    moved: Mapping[int, int] = field(default_factory=dict)
    pieces: tuple[Mapping[int, Rows], ...] = ()


#: (attributes, one rank's part) -> the attributes on the other side.
Localize = Callable[[dict[str, Any], ExprPart], dict[str, Any]]


def local_shape(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Replace the shape of the result by that of the rank's part."""
    return {**attrs, "shape": box_shape(part.box)}


def whole_shape(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Replace the shape of the rank's part by that of the whole result."""
    return {**attrs, "shape": part.shape}


def local_ends(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """End dims that a slice takes entirely where this rank's part ends; others are whole here.

    In a dim in blocks, it takes the pieces of some blocks.
    """
    box = part.boxes[0]
    assert box is not None
    ends = [min(e, stop - start) for e, (start, stop) in zip(attrs["ends"], box, strict=True)]
    starts = [*attrs["starts"]]
    for d in part.moved:
        starts[d], ends[d] = 0, box[d][1] - box[d][0]
    for d, blocks in part.blocks.items():
        if d in part.moved:
            continue
        taken = starts[d], attrs["ends"][d]
        starts[d] = sum(stop - start for (_, end), (start, stop) in blocks if end <= taken[0])
        ends[d] = sum(stop - start for (_, end), (start, stop) in blocks if end <= taken[1])
    return {**attrs, "starts": tuple(starts), "ends": tuple(ends)}


def whole_ends(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Take a dim entirely where the rank's slice ends at the end of its part."""
    shape, box = part.shapes[0], part.boxes[0]
    assert shape is not None and box is not None
    held = zip(attrs["ends"], box_shape(box), shape, strict=True)
    ends = [n if end == local else end for end, local, n in held]
    starts = [*attrs["starts"]]
    for d, by in part.moved.items():
        starts[d], ends[d] = by, by + part.shape[d]
    for d, blocks in part.blocks.items():
        if d in part.moved:
            continue
        runs = _runs(blocks, (attrs["starts"][d], attrs["ends"][d]), part.shape[d])
        cut = part.cuts.get(d)
        # a rank may have as much of others, or nothing of any: then the result says which they are
        runs.sort(key=lambda run: as_blocks(run[1]) != (cut.blocks if cut is not None else None))
        for begin, sizes in runs[:1]:
            starts[d], ends[d] = begin, begin + sum(sizes)
    return {**attrs, "starts": tuple(starts), "ends": tuple(ends)}


def _runs(blocks: Pieces, taken: Interval, extent: int) -> list[tuple[int, list[int]]]:
    """Return where runs of blocks begin, and their sizes, whose pieces are those that are taken."""
    runs, at = list[tuple[int, list[int]]](), 0
    for n, ((begin, _), (start, stop)) in enumerate(blocks):
        ends = [end for (_, end), _ in blocks[n:]]
        if begin + extent in ends:
            run = blocks[n : n + 1 + ends.index(begin + extent)]
            if (at, at + sum(b - a for _, (a, b) in run)) == taken:
                runs.append((begin, [b - a for (a, b), _ in run]))
        at += stop - start
    return runs


def local_squeeze(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Squeeze only dims whose global extent is 1; a local extent of 1 is no reason."""
    shape = part.shapes[0]
    assert shape is not None
    return {"dims": tuple(d % len(shape) for d in attrs["dims"] if shape[d] == 1)}


def local_rows(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which rows of the table this rank has, unless it has all."""
    shape, box = part.shapes[1], part.boxes[1]
    assert shape is not None and box is not None
    if box[0] == (0, shape[0]):
        return attrs
    return {**attrs, "part": (*box[0], shape[0])}


def local_positions(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which rows of the query, and which keys, a causal attention has, unless it has all."""
    if not attrs.get("is_causal"):
        return attrs
    for at, name in enumerate(("rows", "keys")):
        shape, box = part.shapes[at], part.boxes[at]
        assert shape is not None and box is not None
        runs = part.pieces[at].get(len(shape) - 2) if part.pieces else None
        runs = (box[-2],) if runs is None else runs
        if runs != ((0, shape[-2]),):
            attrs = {**attrs, name: runs}
    return attrs


def whole_positions(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Leave out which rows and keys are here."""
    return {name: x for name, x in attrs.items() if name not in ("rows", "keys")}


def local_parts(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which rows and keys an attention has, and how many of the parts of its keys."""
    ((first, stop), *_) = part.box
    return {**local_positions(attrs, part), "parts": stop - first}


def whole_parts(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Count the parts of all keys."""
    return {**attrs, "parts": part.shape[0]}


def local_places(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say what a window takes of this rank's part, and where that lies in the whole slice."""
    shape, box = part.shapes[0], part.boxes[0]
    assert shape is not None and box is not None
    windows = []
    for d, (n, interval) in enumerate(zip(shape, box, strict=True)):
        start, end, step = (attrs[name][d] for name in ("starts", "ends", "steps"))
        if (start, step) == (0, 1) and end >= n:  # taken entirely, from what is here
            start, end = interval
        first, stop = (
            max(-(-(at - start) // step), 0) for at in (interval[0], min(interval[1], end))
        )
        stop = max(first, stop)
        begin = max(start + first * step - interval[0], 0)
        windows.append((begin, begin + (stop - first) * step, (first, stop)))
    starts, ends, places = zip(*windows, strict=True) if windows else ((), (), ())
    local = {"starts": starts, "ends": ends, "places": places, "shape": box_shape(part.box)}
    return {**attrs, **local}


def whole_places(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say what a window takes of the whole, from what it takes of one rank's part."""
    shape, box = part.shapes[0], part.boxes[0]
    if "places" not in attrs or shape is None or box is None or len(shape) != len(part.shape):
        return attrs
    starts, ends = [], []
    for d, (n, taken, (first_row, _)) in enumerate(zip(shape, part.shape, box, strict=True)):
        step, (first, _) = attrs["steps"][d], attrs["places"][d]
        is_all = step == 1 and taken == n  # split likewise, or whole
        start = 0 if is_all else first_row + attrs["starts"][d] - first * step
        starts.append(start)
        ends.append(start + taken * step)
    return {**attrs, "starts": tuple(starts), "ends": tuple(ends)}


def local_draw(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the shape of the whole and the rank's box: numbers follow from global indices."""
    return {**attrs, "shape": part.shape, "box": part.box}


def local_runs(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the shape of the whole and the rank's rows of each dim: the ends of one run, or more.

    >>> part = ExprPart(shapes=(), boxes=(), shape=(8,), box=((0, 4),), runs={0: ((0, 2), (6, 8))})
    >>> local_runs({}, part)
    {'shape': (8,), 'box': ((0, 2, 6, 8),)}
    """
    box = [sum(part.runs[d], ()) if d in part.runs else x for d, x in enumerate(part.box)]
    return {**attrs, "shape": part.shape, "box": tuple(box)}


def local_taken(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say what a rank's part of the result has of the cotangent of a slice, and where."""
    shape, held = part.shapes[0], part.boxes[0]
    assert shape is not None and held is not None
    taken, at = [], []
    for d, (n, (begin, end)) in enumerate(zip(shape, part.box, strict=True)):
        start, step = attrs["starts"][d], attrs["steps"][d]
        if n == part.shape[d]:  # taken entirely: the cotangent is split as the result is
            taken.append((0, held[d][1] - held[d][0]))
            at.append(0)
            continue
        if step == 1 and has_most(n, part.shape[d]):  # it has just the rows that it needs
            rows = part.runs.get(d, (part.box[d],))
            taken.append((0, held[d][1] - held[d][0]))
            at.append(sum(min(max(start - a, 0), b - a) for a, b in rows))
            continue
        first, stop = (min(max(-(-(x - start) // step), 0), n) for x in (begin, end))
        taken.append((first, max(first, stop)))
        at.append(max(start + first * step - begin, 0))
    return {**attrs, "box": part.box, "taken": tuple(taken), "at": tuple(at)}


def global_count(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Give a mean over a split dim the global count, by which each part is divided."""
    if not is_partial(attrs, part):
        return attrs
    shape = part.shapes[0] or ()
    chosen = dims.reduced_dims(attrs.get("dims"), len(shape))
    return {**attrs, "count": math.prod(shape[d] for d in chosen)}


def is_partial(attrs: dict[str, Any], part: ExprPart) -> bool:
    """Return whether this rank has only a part of a dim that is reduced."""
    shape, box = part.shapes[0], part.boxes[0]
    assert shape is not None and box is not None
    return any(box[d] != (0, shape[d]) for d in dims.reduced_dims(attrs.get("dims"), len(shape)))


def with_identity(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Let an empty part give the identity where a reduced dim is split, instead of an error."""
    return {**attrs, "identity": True} if is_partial(attrs, part) else attrs
