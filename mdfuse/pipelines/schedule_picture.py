"""Pictures of schedules over time, as text and as SVG: a lane for each rank group.

In an SVG each phase has its colour, and stages of one rank group have two shades in turn.

gpipe: 9 in all
rank group 0  F0 F1       B0─── B1───   idle 3, live 2
rank group 1     F0 F1 B0─── B1───      idle 3, live 2
"""

from __future__ import annotations

from html import escape

from mdfuse.pipelines.timing import Slot, Timing

#: Columns of the lanes of a picture as text, at most.
_COLUMNS = 100
#: Pixels: the width of all lanes, the height of one, a letter.
_WIDTH, _LANE, _LETTER = 1000.0, 24.0, 6.6

#: The name of each phase, and its hue.
_PHASES = {
    "F": ("forward", 210),
    "B": ("backward", 145),
    "I": ("backward, inputs", 175),
    "W": ("backward, weights", 40),
}

#: Colours follow the page: names of classes are those of all pictures, so one page may hold many.
STYLE = """
.mf-schedule{font:11px ui-monospace,monospace;max-width:100%;height:auto}
.mf-schedule text{fill:#1f2328}.mf-schedule .mf-dim{fill:#656d76}
.mf-schedule .mf-slot{stroke:#57606a;stroke-width:.5;fill-opacity:.45}
@media (prefers-color-scheme:dark){.mf-schedule text{fill:#e6edf3}.mf-schedule .mf-dim{fill:#8d96a0}
.mf-schedule .mf-slot{stroke:#8b949e;fill-opacity:.5}}
""".replace("\n", "")


def text(timing: Timing) -> str:
    """Return a picture as text; where labels do not fit, a phase is its letter alone."""
    slots = [s for lane in timing.lanes for s in lane]
    label = max((len(_label(timing, s)) for s in slots), default=0) + 1
    shortest = min((s.stop - s.start for s in slots), default=1.0)
    scale = label / shortest
    if timing.makespan * scale > _COLUMNS:
        scale = min(_COLUMNS / timing.makespan, 1 / shortest)
    width = round(timing.makespan * scale)
    names = max(map(len, timing.names), default=0)
    lines = [_title(timing)]
    for g, lane in enumerate(timing.lanes):
        cells = [" "] * width
        for slot in lane:
            first, last = round(slot.start * scale), round(slot.stop * scale)
            cells[first:last] = _cell(slot, _label(timing, slot), last - first)
        lines.append(f"{timing.names[g]:{names}}  {''.join(cells)}  {_facts(timing, g)}")
    return "\n".join(lines)


def _title(timing: Timing) -> str:
    return f"{timing.name}: {timing.shown(timing.makespan)} in all"


def _facts(timing: Timing, group: int) -> str:
    return f"idle {timing.shown(timing.bubble[group])}, live {timing.live[group]}"


def _label(timing: Timing, slot: Slot) -> str:
    """Return an action, without its stage where every rank group has one alone."""
    is_plain = all(len({s.action.stage for s in lane}) <= 1 for lane in timing.lanes)
    return f"{slot.action.phase}{slot.action.microbatch}" if is_plain else str(slot.action)


def _cell(slot: Slot, label: str, width: int) -> str:
    if len(label) < width:
        return label.ljust(width - 1, "─") + " "
    return slot.action.phase.ljust(width, "─")


def svg(timing: Timing) -> str:
    """Return a picture as an SVG element."""
    left = _LETTER * max(map(len, timing.names), default=0) + 12
    scale = _WIDTH / (timing.makespan or 1)
    y, body = _LANE, [_text(4, 14, _title(timing))]
    for g, lane in enumerate(timing.lanes):
        body.append(_text(4, y + 16, timing.names[g]))
        stages = sorted({s.action.stage for s in lane})
        for slot in lane:
            x, width = left + slot.start * scale, (slot.stop - slot.start) * scale
            shade = 55 + 20 * (stages.index(slot.action.stage) % 2)
            body.append(_slot(timing, slot, x, width, y, shade))
        body.append(_text(left + _WIDTH + 8, y + 16, _facts(timing, g), "mf-dim"))
        y += _LANE
    phases = {s.action.phase for lane in timing.lanes for s in lane}
    x = left
    for phase in [p for p in _PHASES if p in phases]:
        body.append(_box(x, y + 8, 12, 12, _PHASES[phase][1], 55, ""))
        body.append(_text(x + 18, y + 18, _PHASES[phase][0], "mf-dim"))
        x += 40 + _LETTER * len(_PHASES[phase][0])
    width = (
        left + _WIDTH + 8 + _LETTER * max(len(_facts(timing, g)) for g in range(len(timing.lanes)))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mf-schedule" role="img" '
        f'aria-label="{escape(_title(timing))}" viewBox="0 0 {width:.0f} {y + 26:.0f}" '
        f'width="{width:.0f}"><style>{STYLE}</style>{"".join(body)}</svg>'
    )


def _slot(timing: Timing, slot: Slot, x: float, width: float, y: float, shade: int) -> str:
    """Return an action's box, with as much of its label as fits."""
    a, (name, hue) = slot.action, _PHASES[slot.action.phase]
    title = f"{a}: {name} of stage {a.stage} for microbatch {a.microbatch}"
    title += f", {timing.shown(slot.start)} to {timing.shown(slot.stop)}"
    box = _box(x, y + 2, width, _LANE - 4, hue, shade, title)
    labels = _label(timing, slot), str(a.microbatch)
    fits = next((t for t in labels if _LETTER * len(t) + 2 <= width), "")
    return f"<g>{box}{_text(x + width / 2, y + 16, fits, anchor='middle') if fits else ''}</g>"


def _box(x: float, y: float, width: float, height: float, hue: int, shade: int, title: str) -> str:
    end = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return (
        f'<rect class="mf-slot" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" fill="hsl({hue} 65% {shade}%)"{end}'
    )


def _text(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
