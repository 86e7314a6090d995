"""A picture of a layout as SVG: the parts in proportion, one colour for each holder."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mdfuse.layouts.picture import Band, Picture, PictureGrid, PicturePart, span

#: Pixels: of a whole tensor, and of the smallest part.
_WIDTH, _HEIGHT = 360.0, 200.0
_LEAST_WIDTH, _LEAST_HEIGHT = 34.0, 20.0
_MARGIN, _LINE, _LETTER = 52.0, 16.0, 6.6

#: Colours follow the page: names of classes are those of all pictures, so one page may hold many.
STYLE = """
.mf-layout{font:11px ui-monospace,monospace;max-width:100%;height:auto}
.mf-layout text{fill:#1f2328}.mf-layout .mf-part{stroke:#57606a;fill-opacity:.35}
.mf-layout .mf-chunk{stroke-dasharray:3 2}
@media (prefers-color-scheme:dark){.mf-layout text{fill:#e6edf3}
.mf-layout .mf-part{stroke:#8b949e;fill-opacity:.45}}
""".replace("\n", "")


def svg(picture: Picture, most: int) -> str:
    """Return a picture as an SVG element; of many grids the first ones."""
    top, body, width = _LINE * 1.5, [_text(4, 12, picture.title)], 0.0
    grids = picture.grids
    for grid in grids[:most]:
        if grid.fixed:
            body.append(_text(4, top + 12, ", ".join(f"dim {d} {span(x)}" for d, x in grid.fixed)))
            top += _LINE
        elements, right, top = _grid(picture, grid, top)
        body += elements
        width = max(width, right)
    notes = list(picture.notes)
    if len(grids) > most:
        notes.insert(0, f"… and {len(grids) - most} more like these")
    for note in notes:
        body.append(_text(4, top + 12, note))
        top += _LINE
    width = max([width, *(4 + _LETTER * len(t) for t in (picture.title, *notes))])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mf-layout" role="img" '
        f'aria-label="{escape(picture.title)}" viewBox="0 0 {width:.0f} {top + 6:.0f}" '
        f'width="{width:.0f}"><style>{STYLE}</style>{"".join(body)}</svg>'
    )


def _grid(picture: Picture, grid: PictureGrid, top: float) -> tuple[list[str], float, float]:
    """Return the elements of a grid, its right edge, and its lower one."""
    n = len(picture.dims)
    labels = [picture.label(p) for row in grid.parts for p in row if p is not None]
    labels += [_span(band) for band in (grid.columns if n else ())]
    least = max([_LEAST_WIDTH, *(_LETTER * len(t) + 8 for t in labels)])
    names = [_span(band) for band in (grid.rows if n > 1 else ())]
    left = max([_MARGIN, *(_LETTER * len(t) + 8 for t in names)])
    xs = _edges(left, grid.columns, _WIDTH, least)
    ys = _edges(top + (_LINE if n else 0), grid.rows, _HEIGHT if n > 1 else 30.0, _LEAST_HEIGHT)
    body = []
    for c, band in enumerate(grid.columns if n else ()):
        body.append(_text((xs[c] + xs[c + 1]) / 2, top + 12, _span(band), "middle"))
    for r, name in enumerate(names):
        body.append(_text(left - 4, (ys[r] + ys[r + 1]) / 2 + 4, name, "end"))
    for r, row in enumerate(grid.parts):
        for c, part in enumerate(row):
            body.append(_part(picture, part, xs[c], ys[r], xs[c + 1] - xs[c], ys[r + 1] - ys[r]))
    return body, xs[-1] + 4, ys[-1] + 6


def _edges(start: float, bands: Sequence[Band | None], size: float, least: float) -> list[float]:
    """Return where bands begin and end, in proportion, none too narrow for its label."""
    lengths = [b.interval[1] - b.interval[0] for b in bands if b is not None]
    unit = size / max(1, sum(lengths))
    edges = [start]
    for band in bands:
        length = 0 if band is None else band.interval[1] - band.interval[0]
        edges.append(edges[-1] + max(least, unit * length))
    return edges


def _part(
    picture: Picture, part: PicturePart | None, x: float, y: float, width: float, height: float
) -> str:
    middle = _text(x + width / 2, y + height / 2 + 4, "…", "middle")
    if part is None:
        return middle
    hue = _hue(picture, part)
    chunk = " mf-chunk" if part.iteration is not None else ""
    box = ", ".join(f"dim {d} {span(i)}" for d, i in enumerate(part.box))
    return (
        f'<g><title>{escape(box)}</title><rect class="mf-part{chunk}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{height:.1f}" fill="hsl({hue} 70% 60%)"/>'
        + _text(x + width / 2, y + height / 2 + 4, picture.label(part), "middle")
        + "</g>"
    )


def _hue(picture: Picture, part: PicturePart) -> int:
    """Return a colour for the first rank that holds a part: neighbours differ by the golden angle.

    A whole value, held by all, is grey-blue everywhere.
    """
    position = picture.layout.mesh.position(part.terms[0][0]) or 0
    return round(210 + 137.508 * position) % 360


def _span(band: Band | None) -> str:
    return "…" if band is None else span(band.interval)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
