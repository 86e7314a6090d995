"""A picture of a layout as text, with lines between the parts."""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.layouts.picture import Band, Picture, PictureGrid, span


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
