"""Charts of a report as SVG: lanes of a timeline, and memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from mdfuse.seeing.events import Event, lane_place, lanes
from mdfuse.seeing.memory_use import Life, Memory
from mdfuse.seeing.report.numbers import size_text, time_text

#: Pixels: width of the drawing, of the names on its left, and height of a lane.
_WIDTH, _NAMES, _LANE = 1000.0, 96.0, 20.0
#: Events narrower than this many pixels, with nothing between them, are drawn as one.
_NARROW = 0.6
#: The number of points of a curve of memory, and of buffers that it tells apart.
_POINTS, _LAYERS = 400, 9
_HEIGHT = 180.0
#: Pixels of a letter.
_LETTER = 6.6


#: Colours of a chart that stands alone, on a light or a dark page; a report has its own.
_STYLE = """
.mf-chart{font:11px ui-monospace,monospace;max-width:100%;height:auto}
.mf-chart text{fill:#656d76}.mf-chart .mf-head{fill:#1f2328;font-weight:600}
.mf-work{fill:#4c8dd6}.mf-transfer{fill:#0a7a53}.mf-wait{fill:#c69026}.mf-post{fill:#8250df}
.mf-mark{stroke:#d0d7de}
@media (prefers-color-scheme:dark){.mf-chart text{fill:#8d96a0}.mf-chart .mf-head{fill:#e6edf3}
.mf-transfer{fill:#3fb98a}.mf-mark{stroke:#30363d}}
""".replace("\n", "")


def alone(chart: str) -> str:
    """Return a chart that brings its colours, as a file or a notebook shows it."""
    width = f"{_NAMES + _WIDTH + 60:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
    return chart.replace("<svg ", head, 1).replace(">", f"><style>{_STYLE}</style>", 1)


def lanes_chart(events: Sequence[Event], names: dict[int, str]) -> str:
    """Return the lanes of some ranks, one under the other, by one time axis.

    Args:
        events: of any ranks.
        names: rank -> its title.
    """
    start = min((e.start_ns for e in events), default=0)
    span = max((e.stop_ns for e in events), default=0) - start or 1
    rows = sorted(lanes(events).items(), key=lambda row: (row[0][0], lane_place(row[0][1])))
    body, y, last = [], 6.0, None
    for (rank, lane), lane_events in rows:
        if rank != last:
            body.append(_text(0, y + 13, names.get(rank, f"rank {rank}"), "mf-head"))
            y, last = y + _LANE, rank
        body.append(_text(8, y + 13, lane))
        body += [_bar(row, start, span, y) for row in _folded(lane_events, span)]
        y += _LANE
    marks = [_mark(n / 4, span, y) for n in range(5)]
    size = f'viewBox="0 0 {_NAMES + _WIDTH + 60:.0f} {y + 20:.0f}"'
    inner = "".join([*marks, *body])
    return f'<svg class="mf-chart" {size} role="img" aria-label="timeline">{inner}</svg>'


def _folded(row: Sequence[Event], span: int) -> list[list[Event]]:
    """Return events one by one, but narrow ones that touch together."""
    bars: list[list[Event]] = []
    least = span * _NARROW / _WIDTH
    for e in row:
        is_narrow = e.stop_ns - e.start_ns < least
        if is_narrow and bars and e.stop_ns - bars[-1][0].start_ns < least:
            bars[-1].append(e)
        elif e.stop_ns > e.start_ns:
            bars.append([e])
    return bars


def _bar(row: Sequence[Event], start: int, span: int, y: float) -> str:
    first, last = row[0], row[-1]
    x = _NAMES + (first.start_ns - start) / span * _WIDTH
    width = max(0.5, (last.stop_ns - first.start_ns) / span * _WIDTH)
    took = time_text((last.stop_ns - first.start_ns) / 1e9)
    title = f"{len(row)} events, {took}" if len(row) > 1 else _title(first, took)
    return (
        f'<rect class="mf-{first.part}" x="{x:.2f}" y="{y + 2:.0f}" width="{width:.2f}" '
        f'height="{_LANE - 4:.0f}"><title>{escape(title)}</title></rect>'
    )


def _title(e: Event, took: str) -> str:
    details = [took, e.source, size_text(e.nbytes) if e.nbytes else "", e.detail]
    return ", ".join([e.name, *filter(None, details)])


def _mark(share: float, span: int, y: float) -> str:
    x = _NAMES + share * _WIDTH
    line = f'<line class="mf-mark" x1="{x:.0f}" x2="{x:.0f}" y1="4" y2="{y:.0f}"/>'
    return line + _text(x, y + 14, time_text(span * share / 1e9), anchor="middle")


def memory_chart(memory: Memory) -> str:
    """Return a chart of a rank's memory over its instructions, its largest buffers apart."""
    points = _sampled(memory)
    inputs = [x for x in memory.lives if x.is_input]
    buffers = [x for x in memory.lives if not x.is_input]
    big = sorted(buffers, key=lambda x: -x.nbytes * (x.last - x.first + 1))[:_LAYERS]
    layers: list[tuple[str, list[Life] | None]] = [("inputs", inputs)]
    layers += [(f"%{x.name}", [x]) for x in sorted(big, key=lambda x: x.first)]
    below, body, shown = [0] * len(points), list[str](), list[tuple[str, str]]()
    top = max(memory.peak, 1)
    for n, (name, lives) in enumerate([*layers, ("all others", None)]):
        others = [memory.bytes[p] - b for p, b in zip(points, below, strict=True)]
        sizes = _sizes(lives, points) if lives is not None else others
        above = [b + size for b, size in zip(below, sizes, strict=True)]
        if any(sizes):
            hue = 210 if name == "inputs" else 0 if name == "all others" else 40 + 36 * n
            title = f"{name}, at most {size_text(max(sizes))}"
            colour = "hsl(0 0% 60%)" if name == "all others" else f"hsl({hue % 360} 60% 55%)"
            body.append(_area(points, below, above, top, colour, title))
            shown.append((name, colour))
        below = above
    marks = [_level(share, memory.peak) for share in (0.5, 1.0)]
    x = _NAMES + (memory.peak_at + 1.5) / (points[-1] + 1) * _WIDTH
    body.append(f'<line class="mf-peak" x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{_HEIGHT + 6:.0f}"/>')
    body.append(_text(_NAMES, _HEIGHT + 22, "start"))
    end = f"instruction {points[-1]}"
    body.append(_text(_NAMES + _WIDTH, _HEIGHT + 22, end, anchor="end"))
    legend, y = _legend(shown, _HEIGHT + 34)
    size = f'viewBox="0 0 {_NAMES + _WIDTH + 60:.0f} {y + 8:.0f}"'
    inner = "".join([*marks, *body, *legend])
    return f'<svg class="mf-chart" {size} role="img" aria-label="memory">{inner}</svg>'


def _legend(shown: Sequence[tuple[str, str]], y: float) -> tuple[list[str], float]:
    """Return names beside their colours, in as many rows as they need, and the lower edge."""
    items, x = list[str](), _NAMES
    for name, colour in shown:
        width = 34 + _LETTER * len(name)
        if x > _NAMES and x + width > _NAMES + _WIDTH:
            x, y = _NAMES, y + 18
        box = f'<rect x="{x:.0f}" y="{y:.0f}" width="10" height="10" fill="{colour}"/>'
        items += [box, _text(x + 15, y + 9, name)]
        x += width
    return items, y + 18


def _sampled(memory: Memory) -> list[int]:
    """Return the points of time that are drawn: the highest one of each stretch."""
    held = memory.bytes
    if len(held) <= _POINTS:
        return [*range(len(held))]
    edges = [n * len(held) // _POINTS for n in range(_POINTS + 1)]
    points = {max(range(a, b), key=held.__getitem__) for a, b in pairwise(edges)}
    return sorted(points | {0, len(held) - 1})


def _sizes(lives: Sequence[Life], points: Sequence[int]) -> list[int]:
    """Return the bytes of some buffers at each point; point n is behind instruction n - 1."""
    return [sum(x.nbytes for x in lives if x.first < p <= x.last) for p in points]


def _area(
    points: Sequence[int],
    below: Sequence[int],
    above: Sequence[int],
    top: int,
    colour: str,
    title: str,
) -> str:
    edges = [*points, points[-1] + 1]

    def steps(sizes: Sequence[int]) -> list[str]:
        ys = [f"{6 + _HEIGHT * (1 - size / top):.1f}" for size in sizes]
        xs = [f"{_NAMES + p / edges[-1] * _WIDTH:.1f}" for p in edges]
        pairs = zip(xs, xs[1:], ys, strict=False)
        return [f"{x},{y}" for left, right, y in pairs for x in (left, right)]

    forth, back = steps(above), steps(below)
    line = " ".join([*forth, *reversed(back)])
    return f'<polygon points="{line}" fill="{colour}"><title>{escape(title)}</title></polygon>'


def _level(share: float, peak: int) -> str:
    y = 6 + _HEIGHT * (1 - share)
    line = f'<line class="mf-mark" x1="{_NAMES}" x2="{_NAMES + _WIDTH}" y1="{y}" y2="{y}"/>'
    return line + _text(_NAMES - 6, y + 4, size_text(round(peak * share)), anchor="end")


def _text(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text{kind} x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
