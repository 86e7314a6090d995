"""The bars of benchmarks/layers.py and overlap.py: times of all contenders, from stored results."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdfuse.cli import screen

#: What is drawn: the times of one call, on a GPU or a CPU.
_DRAWN = ("GPU, one call", "time")

#: Layers side by side.
_COLUMNS = 5


def times(paths: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Layer -> contender -> median of microseconds."""
    by_row: dict[str, dict[str, float]] = {}
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            layer, _, what = row["name"].partition(": ")
            if what in _DRAWN and row["alternative"] != "nothing":
                bars = by_row.setdefault(f"{layer}\n{row['sizes']}", {})
                bars["mdfuse"] = row["ours"]["median"] / 1e3
                bars[row["alternative"]] = row["against"]["median"] / 1e3
    return by_row


def draw(paths: Sequence[Path], to: Path) -> None:
    """Write a picture, or say why there is none."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        screen.output().print("not drawn: matplotlib is not installed; --plot draws it later")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    by_row = times(paths)
    names = list(dict.fromkeys(name for bars in by_row.values() for name in bars))
    columns = min(len(by_row), _COLUMNS)
    lines = math.ceil(len(by_row) / columns)
    figure: Any
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(2.6 * columns, 3 * lines), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(by_row) :]:
        panel.set_axis_off()
    for panel, (layer, bars) in zip(panels.flat, by_row.items(), strict=False):
        for name, took in bars.items():
            at = names.index(name)
            panel.bar(at, took, color=f"C{at}")
            panel.text(at, took, f"{took:,.0f}", ha="center", va="bottom", fontsize=6)
        panel.set_title(layer, fontsize=8)
        panel.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        panel.tick_params(axis="y", labelsize=6)
    for panel in panels[:, 0]:
        panel.set_ylabel("µs, median", fontsize=7)
    figure.savefig(to, dpi=150)
    screen.output().print(f"drawn: {to}", soft_wrap=True)
