"""Pictures of layouts: which ranks hold which part of a tensor, as text and as SVG.

    [8,6] (dp=S0, tp=S1) on mesh(dp=2, tp=2)
           0:3   3:6
        ┌─────┬─────┐
    0:4 │  0  │  1  │
        ├─────┼─────┤
    4:8 │  2  │  3  │
        └─────┴─────┘

A part shows its ranks: `0 1` hold the same; `0 + 1` hold terms, whose sum is the value; `#2` is the
iteration of the host's loop that computes a chunk. At most two dims span a picture: of more that
are split, each part gets a picture of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from mdfuse.errors import LayoutError
from mdfuse.layouts.boxes import Box, Interval
from mdfuse.layouts.layout import Layout

#: If a dim has more intervals, the first and the last ones are shown; likewise for ranks.
_SHOWN, _FIRST, _LAST = 12, 8, 2
_RANKS = 6
#: If further dims give more pictures, only the first ones are shown.
_GRIDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """An interval of a dim, and who holds it.

    Attributes:
        interval: rows of the whole.
        where: axis -> coordinate of the ranks that hold it.
        chunk: which chunk of their part it is; None where the dim is not streamed.
    """

    interval: Interval
    where: tuple[tuple[str, int], ...] = ()
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePart:
    """A part of a tensor in a picture.

    Attributes:
        box: where it lies in the whole.
        terms: the ranks that hold it: one tuple, of replicas, for each term of a Partial; or for
            each rank, where a placement varies.
        iteration: of the host's loop; None where the layout is not streamed.
    """

    box: Box
    terms: tuple[tuple[int, ...], ...]
    iteration: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureGrid:
    """One grid of a picture.

    Attributes:
        fixed: (dim, interval) of split dims that do not span it.
        rows: intervals from top to bottom; None stands for those left out.
        columns: likewise from left to right.
        parts: for each row, a part for each column; None where something is left out.
    """

    fixed: tuple[tuple[int, Interval], ...]
    rows: tuple[Band | None, ...]
    columns: tuple[Band | None, ...]
    parts: tuple[tuple[PicturePart | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the ranks that hold each part of a tensor; prints as text, in notebooks as SVG.

    Args:
        layout: of the tensor.
        shape: its global extents, numbers.

    Raises:
        LayoutError: the layout splits a dim that the shape does not have; an extent is no number.

    >>> from mdfuse import DeviceMesh, Shard
    >>> print(Layout(DeviceMesh.arange(tp=3), {"tp": Shard(0)}).picture([7]))
    [7] (tp=S0) on mesh(tp=3)
      0:3   3:6   6:7
    ┌─────┬─────┬─────┐
    │  0  │  1  │  2  │
    └─────┴─────┴─────┘
    """

    layout: Layout
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(type(n) is not int or n < 0 for n in self.shape):
            raise LayoutError(
                f"a picture of {list(self.shape)}",
                because="a picture shows a tensor of known extents",
                hint="pass numbers, for example of one run",
            )
        layout = self.layout.normalized(len(self.shape), may_vary=True)
        if layout.stream is not None and layout.stream.op is not None:  # all of it, in each chunk
            layout = layout.with_stream(None)
        object.__setattr__(self, "layout", layout)

    @property
    def title(self) -> str:
        """The shape, the layout, and the mesh."""
        return f"[{','.join(map(str, self.shape))}] {self.layout} on {self.layout.mesh}"

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that span the grids: those that are split or streamed first, at most two."""
        split = [d for d, _ in self.layout.splits]
        if self.layout.stream is not None and self.layout.stream.dim not in split:
            split.append(self.layout.stream.dim)
        others = [d for d in reversed(range(len(self.shape))) if d not in split]
        return tuple(sorted([*split, *others][:2]))

    def bands(self, dim: int) -> list[Band]:
        """Return the intervals of a dim, in order, without empty ones unless all are."""
        axes, bands = self.layout.split_axes(dim), []
        stream = self.layout.stream
        is_whole = stream is not None and stream.dim == dim and stream.index is None
        for choice, interval in self.layout.chunks_of(dim, self.shape[dim]):
            where = tuple(zip(axes, choice, strict=True))
            if stream is None or not is_whole:
                bands.append(Band(interval=interval, where=where))
                continue
            if dim in self.layout.blocked:  # each is a chunk, one after the other on each rank
                bands.append(Band(interval=interval, where=where, chunk=len(bands) % stream.count))
                continue
            chunks = [stream.interval(interval, i) for i in range(stream.count)]
            bands += [Band(interval=x, where=where, chunk=i) for i, x in enumerate(chunks)]
        if dim in self.layout.blocked:
            bands.sort(key=lambda band: band.interval)
        return [b for b in bands if b.interval[0] < b.interval[1]] or bands[:1]

    @property
    def grids(self) -> tuple[PictureGrid, ...]:
        """The grids: one, or one for each part along the split dims that do not span it."""
        spanned = self.dims
        others = [d for d, _ in self.layout.splits if d not in spanned]
        stream = self.layout.stream
        if stream is not None and stream.dim not in (*spanned, *others):
            others.append(stream.dim)
        bands = [self.bands(d) for d in others]
        choices = (dict(zip(others, choice, strict=True)) for choice in product(*bands))
        return tuple(self._grid(spanned, fixed) for fixed in choices)

    def _grid(self, dims: Sequence[int], fixed: dict[int, Band]) -> PictureGrid:
        one = (Band(interval=(0, 1)),)
        rows = _few(self.bands(dims[0])) if len(dims) == 2 else one
        columns = _few(self.bands(dims[-1])) if dims else one

        def part(row: Band | None, column: Band | None) -> PicturePart | None:
            if row is None or column is None:
                return None
            bands = (row, column)[2 - len(dims) :]
            return self._part({**fixed, **dict(zip(dims, bands, strict=True))})

        parts = tuple(tuple(part(row, column) for column in columns) for row in rows)
        pairs = tuple((d, band.interval) for d, band in fixed.items())
        return PictureGrid(fixed=pairs, rows=rows, columns=columns, parts=parts)

    def _part(self, bands: dict[int, Band]) -> PicturePart:
        """Return the part of the tensor that lies in one interval for each of some dims."""
        at = {axis: n for band in bands.values() for axis, n in band.where}
        box = tuple(bands[d].interval if d in bands else (0, n) for d, n in enumerate(self.shape))
        chunk = next((b.chunk for b in bands.values() if b.chunk is not None), None)
        iteration, stream = chunk, self.layout.stream
        if chunk is not None and stream is not None and stream.rotate is not None:
            turn = at.get(stream.rotate)
            iteration = None if turn is None else (chunk - turn) % stream.count
        return PicturePart(box=box, terms=self._terms(at), iteration=iteration)

    def _terms(self, at: dict[str, int]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks at some coordinates: a tuple of replicas for each term."""
        mesh = self.layout.mesh
        apart = (*self.layout.partial_axes, *self.layout.varying_axes)
        copies = [a for a in mesh.axes if a not in at and a not in apart]
        first = mesh.rank_at([at.get(a, 0) for a in mesh.axes])
        heads = mesh.team(first, *apart) if apart else (first,)
        return tuple(mesh.team(r, *copies) if copies else (r,) for r in heads)

    @property
    def empty(self) -> tuple[int, ...]:
        """The ranks that hold nothing, though they are in the mesh."""
        layout, shape = self.layout, self.shape
        if 0 in shape or all(min(map(_length, self._all(d))) > 0 for d, _ in layout.splits):
            return ()
        return tuple(r for r in layout.mesh if 0 in layout.local_shape(shape, r))

    def _all(self, dim: int) -> Iterator[Interval]:
        return (interval for _, interval in self.layout.chunks_of(dim, self.shape[dim]))

    def label(self, part: PicturePart) -> str:
        """Return what a part shows: its ranks, and the iteration of the host's loop."""
        ops = [*self.layout.reduce_ops.values()]
        texts = [_ranks(t) for t in part.terms[:_RANKS]]
        texts += ["…"] if len(part.terms) > _RANKS else []
        if len(part.terms) > 1 and any(len(t) > 1 for t in part.terms):
            texts = [f"({t})" for t in texts]
        if not ops:
            text = " | ".join(texts)
        elif {*ops} <= {"sum"}:
            text = " + ".join(texts)
        else:
            text = f"{ops[0]}({', '.join(texts)})"
        return text if part.iteration is None else f"{text} #{part.iteration}"

    @property
    def notes(self) -> tuple[str, ...]:
        """The meaning of the signs in the picture, and the ranks that hold nothing."""
        lines, layout = [], self.layout
        if len(self.shape) > 2:
            rows, columns = self.dims
            lines.append(f"rows are dim {rows}, columns dim {columns}")
        if layout.reduce_ops:
            op = ", ".join(dict.fromkeys(layout.reduce_ops.values()))
            lines.append(f"each rank holds a term: their {op} is the value")
        if layout.varying_axes:
            lines.append(f"a | b: ranks along {', '.join(layout.varying_axes)} differ")
        stream = layout.stream
        if stream is not None and stream.index is None:
            split = {a for _, axes in layout.splits for a in axes}
            if stream.rotate is None or stream.rotate in split:
                lines.append(f"#n: iteration n of the host's loop over {stream.count} chunks")
            else:
                lines.append(f"each rank along {stream.rotate} begins at its own chunk")
        if self.empty:
            lines.append(f"nothing lies on {_ranks(self.empty)}")
        return tuple(lines)

    def __str__(self) -> str:
        return text(self, _GRIDS)

    def svg(self) -> str:
        """Return the picture as an SVG element, in the colours of a light or a dark page."""
        from mdfuse.layouts.picture_svg import svg

        return svg(self, _GRIDS)

    def _repr_svg_(self) -> str:
        return self.svg()


def span(interval: Interval) -> str:
    """Return an interval as Python writes a slice: `0:4`."""
    return f"{interval[0]}:{interval[1]}"


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _few(bands: list[Band]) -> tuple[Band | None, ...]:
    if len(bands) <= _SHOWN:
        return tuple(bands)
    return (*bands[:_FIRST], None, *bands[-_LAST:])


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: all of a few, of many the first ones and how many there are."""
    if len(ranks) <= _RANKS:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[: _RANKS - 2]))} … ({len(ranks)})"


# -- as text, with lines between the parts ---------------------------------------------------------


def text(picture: Picture, most: int) -> str:
    """Return a picture as text; of many grids the first ones."""
    grids = picture.grids
    lines = [picture.title]
    for grid in grids[:most]:
        if grid.fixed:
            lines.append(", ".join(f"dim {d} {span(x)}" for d, x in grid.fixed))
        lines += _grid(picture, grid)
    if len(grids) > most:
        lines.append(f"… and {len(grids) - most} more like these")
    return "\n".join([*lines, *picture.notes])


def _grid(picture: Picture, grid: PictureGrid) -> list[str]:
    """Return the lines of one grid: intervals of columns above, of rows on the left."""
    n = len(picture.dims)
    heads = [_head(band, n > 0) for band in grid.columns]
    sides = [_head(band, n > 1) for band in grid.rows]
    cells = [["…" if p is None else picture.label(p) for p in row] for row in grid.parts]
    widths = [
        max(len(head), *(len(row[c]) for row in cells)) + 2 for c, head in enumerate(heads)
    ] or [2]
    left = max(map(len, sides), default=0)
    lines = [f"{'':{left}}  {' '.join(map(str.center, heads, widths))}".rstrip()] if n else []
    lines.append(_rule(left, widths, "┌┬┐"))
    for r, row in enumerate(cells):
        if r:
            above, current = grid.rows[r - 1], grid.rows[r]
            lines.append(_rule(left, widths, "├┼┤", "╌" if _is_inside(above, current) else "─"))
        inner = _joined(grid.columns, [t.center(w) for t, w in zip(row, widths, strict=True)])
        lines.append(f"{sides[r]:>{left}} │{inner}│")
    lines.append(_rule(left, widths, "└┴┘"))
    return [line[1:] if left == 0 else line for line in lines]


def _head(band: Band | None, is_shown: bool) -> str:
    if not is_shown:
        return ""
    return "…" if band is None else span(band.interval)


def _joined(columns: Sequence[Band | None], cells: Sequence[str]) -> str:
    """Join the cells of a row; chunks of one part have a dashed line between them."""
    line = cells[0] if cells else "  "
    for n, cell in enumerate(cells[1:], 1):
        line += ("┊" if _is_inside(columns[n - 1], columns[n]) else "│") + cell
    return line


def _is_inside(a: Band | None, b: Band | None) -> bool:
    """Return whether two neighbours are chunks of one part."""
    return a is not None and b is not None and b.chunk is not None and a.where == b.where


def _rule(left: int, widths: Sequence[int], ends: str, line: str = "─") -> str:
    first, middle, last = tuple(ends)
    return f"{'':{left}} {first}{middle.join(line * w for w in widths)}{last}"
