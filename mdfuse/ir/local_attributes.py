"""Turn an op's attributes into those for one rank's part of it, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mdfuse.ir import dims
from mdfuse.ir.shifts import has_most
from mdfuse.layouts.blocks import Cut, as_blocks, segments
from mdfuse.layouts.boxes import Box, Interval, Rows, box_shape

#: Each block of a dim, and the rows of it that a rank has.
Pieces = tuple[tuple[Interval, Interval], ...]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A rank's part of a tensor.

    Attributes:
        shape: of the whole.
        box: the part; dims in blocks are counted from 0.
        cuts: dim in blocks -> its blocks.
        runs: dim of which a rank may have several runs of rows -> its runs.
        moved: dim of an operand of which the rank has just the rows that it needs -> by how many
            rows these lie behind those of the result.
    """

    shape: tuple[int, ...]
    box: Box
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    runs: Mapping[int, Rows] = field(default_factory=dict)
    moved: Mapping[int, int] = field(default_factory=dict)

    def has_all(self, *dims: int) -> bool:
        """Return whether the part is the whole along some dims."""
        return all(self.box[d] == (0, self.shape[d]) for d in dims)

    def ends(self, dim: int) -> tuple[int, int, int]:
        """Return the ends of the part along a dim, and the extent of the whole."""
        return (*self.box[dim], self.shape[dim])

    @property
    def blocks(self) -> dict[int, Pieces]:
        """For each dim in blocks, but for zigzag order, each block and the rows of the rank."""
        return {
            d: tuple(zip(segments(self.cuts[d].blocks, self.shape[d]), rows, strict=True))
            for d, rows in self.runs.items()
            if d in self.cuts and self.cuts[d].blocks != "zigzag"
        }

    @property
    def whole(self) -> TensorPart:
        """The part of a rank that has all of it."""
        return replace(self, box=tuple((0, n) for n in self.shape))


@dataclass(frozen=True, slots=True)
class ExprPart:
    """A rank's parts of an expression's operands and result; `part[n]` is that of an operand.

    Attributes:
        operands: None for those that are not tensors.
        out: of the result.
    """

    operands: tuple[TensorPart | None, ...]
    out: TensorPart

    def __getitem__(self, n: int) -> TensorPart:
        operand = self.operands[n]
        assert operand is not None
        return operand


#: (attributes, one rank's part) -> the attributes on the other side.
Localize = Callable[[dict[str, Any], ExprPart], dict[str, Any]]


def local_shape(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Replace the shape of the result by that of the rank's part."""
    return {**attrs, "shape": box_shape(part.out.box)}


def whole_shape(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Replace the shape of the rank's part by that of the whole result."""
    return {**attrs, "shape": part.out.shape}


def local_ends(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """End dims that a slice takes entirely where this rank's part ends; others are whole here.

    In a dim in blocks, it takes the pieces of some blocks.
    """
    x, starts = part[0], [*attrs["starts"]]
    sizes = box_shape(x.box)
    ends = [min(e, n) for e, n in zip(attrs["ends"], sizes, strict=True)]
    for d in x.moved:
        starts[d], ends[d] = 0, sizes[d]
    for d, blocks in x.blocks.items():
        if d in x.moved:
            continue
        taken = starts[d], attrs["ends"][d]
        starts[d] = sum(stop - start for (_, end), (start, stop) in blocks if end <= taken[0])
        ends[d] = sum(stop - start for (_, end), (start, stop) in blocks if end <= taken[1])
    return {**attrs, "starts": tuple(starts), "ends": tuple(ends)}


def whole_ends(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Take a dim entirely where the rank's slice ends at the end of its part."""
    x, starts = part[0], [*attrs["starts"]]
    local_ends = zip(attrs["ends"], box_shape(x.box), x.shape, strict=True)
    ends = [n if end == local else end for end, local, n in local_ends]
    for d, by in x.moved.items():
        starts[d], ends[d] = by, by + part.out.shape[d]
    for d, blocks in x.blocks.items():
        if d in x.moved:
            continue
        runs = _runs(blocks, (attrs["starts"][d], attrs["ends"][d]), part.out.shape[d])
        cut = part.out.cuts.get(d)
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
    shape = part[0].shape
    return {"dims": tuple(d % len(shape) for d in attrs["dims"] if shape[d] == 1)}


def local_rows(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows of the table that this rank has, unless it has all."""
    table = part[1]
    return attrs if table.has_all(0) else {**attrs, "part": table.ends(0)}


def local_positions(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows of the query and the keys of a causal attention, unless all are here."""
    if not attrs.get("is_causal"):
        return attrs
    for at, name in enumerate(("rows", "keys")):
        x = part[at]
        runs = x.runs.get(len(x.shape) - 2, (x.box[-2],))
        if runs != ((0, x.shape[-2]),):
            attrs = {**attrs, name: runs}
    return attrs


def whole_positions(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Leave out the rows and the keys that are here."""
    return {name: x for name, x in attrs.items() if name not in ("rows", "keys")}


def local_parts(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows and the keys of an attention, and the number of parts of its keys here."""
    ((first, stop), *_) = part.out.box
    return {**local_positions(attrs, part), "parts": stop - first}


def whole_parts(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Count the parts of all keys."""
    return {**attrs, "parts": part.out.shape[0]}


def local_places(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows that a window takes of this rank's part, and their place in the slice."""
    windows = []
    for d, (n, interval) in enumerate(zip(part[0].shape, part[0].box, strict=True)):
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
    local = {"starts": starts, "ends": ends, "places": places, "shape": box_shape(part.out.box)}
    return {**attrs, **local}


def whole_places(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows that a window takes of the whole, from those of one rank's part."""
    x, shape = part.operands[0], part.out.shape
    if "places" not in attrs or x is None or len(x.shape) != len(shape):
        return attrs
    starts, ends = [], []
    for d, (n, taken, (first_row, _)) in enumerate(zip(x.shape, shape, x.box, strict=True)):
        step, (first, _) = attrs["steps"][d], attrs["places"][d]
        is_all = step == 1 and taken == n  # split likewise, or whole
        start = 0 if is_all else first_row + attrs["starts"][d] - first * step
        starts.append(start)
        ends.append(start + taken * step)
    return {**attrs, "starts": tuple(starts), "ends": tuple(ends)}


def local_draw(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the shape of the whole and the rank's box: numbers follow from global indices."""
    return {**attrs, "shape": part.out.shape, "box": part.out.box}


def local_runs(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the shape of the whole and the rank's rows of each dim: the ends of one run, or more.

    >>> out = TensorPart((8,), ((0, 4),), runs={0: ((0, 2), (6, 8))})
    >>> local_runs({}, ExprPart((), out))
    {'shape': (8,), 'box': ((0, 2, 6, 8),)}
    """
    out = part.out
    box = [sum(out.runs[d], ()) if d in out.runs else x for d, x in enumerate(out.box)]
    return {**attrs, "shape": out.shape, "box": tuple(box)}


def local_taken(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows of a slice's cotangent in the rank's part of the result, and their place."""
    ct, out = part[0], part.out
    sizes, taken, at = box_shape(ct.box), [], []
    for d, (n, (begin, end)) in enumerate(zip(ct.shape, out.box, strict=True)):
        start, step = attrs["starts"][d], attrs["steps"][d]
        if n == out.shape[d]:  # taken entirely: the cotangent is split as the result is
            taken.append((0, sizes[d]))
            at.append(0)
            continue
        is_part = ct.box[d] != (0, n) or d in out.runs
        if step == 1 and is_part and has_most(n, out.shape[d]):  # it has just the rows it needs
            rows = out.runs.get(d, (out.box[d],))
            taken.append((0, sizes[d]))
            at.append(sum(min(max(start - a, 0), b - a) for a, b in rows))
            continue
        first, stop = (min(max(-(-(x - start) // step), 0), n) for x in (begin, end))
        taken.append((first, max(first, stop)))
        at.append(max(start + first * step - begin, 0))
    return {**attrs, "box": out.box, "taken": tuple(taken), "at": tuple(at)}


def global_count(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Give a mean over a split dim the global count, by which each part is divided."""
    if not is_partial(attrs, part):
        return attrs
    shape = part[0].shape
    chosen = dims.reduced_dims(attrs.get("dims"), len(shape))
    return {**attrs, "count": math.prod(shape[d] for d in chosen)}


def is_partial(attrs: dict[str, Any], part: ExprPart) -> bool:
    """Return whether this rank has only a part of a dim that is reduced."""
    x = part[0]
    return not x.has_all(*dims.reduced_dims(attrs.get("dims"), len(x.shape)))


def with_identity(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Let an empty part give the identity where a reduced dim is split, instead of an error."""
    return {**attrs, "identity": True} if is_partial(attrs, part) else attrs
