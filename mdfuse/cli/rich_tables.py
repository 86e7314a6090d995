"""The tables and texts that the command line shows, as rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Column, Table
from rich.text import Text

from mdfuse.cli.launched_runs import Difference
from mdfuse.compiled.program import Program, compile
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.hir.traffic import Traffic, by_kind
from mdfuse.layouts.picture import Picture
from mdfuse.seeing.rank_classes import rank_classes
from mdfuse.seeing.report.numbers import size_text, time_text
from mdfuse.seeing.report.page import by_layout, values_of

__all__ = [
    "communications",
    "differences",
    "facts",
    "layout_pictures",
    "program_text",
    "size_range",
    "size_text",
    "time_text",
    "titled",
]


def facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Return a table of names and facts, in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, what in rows:
        table.add_row(name, Text(what) if isinstance(what, str) else what)
    return table


def titled(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table with a title; the columns of numbers, on the right, align there."""
    headers: tuple[str | Column, ...] = (
        *columns,
        *(Column(name, justify="right") for name in right),
    )
    return Table(*headers, box=box.SIMPLE_HEAD, title=title, title_justify="left")


def communications(program: Program) -> Table:
    """Return a table of communications: kind, axis, count, bytes that a rank receives in a run."""
    right = ("count", "bytes received per rank")
    table = titled("communications per run", "kind", "axis", right=right)
    ranks = rank_classes(program.host).firsts
    total = Traffic(len(ranks))
    for (kind, where), traffic in by_kind(program.host, ranks).items():
        table.add_row(kind, where, str(max(traffic.times)), size_range(traffic.bytes))
        total.add(traffic)
    table.add_section()
    table.add_row("all", "", str(max(total.times)), size_range(total.bytes))
    return table


def size_range(sizes: Sequence[int]) -> str:
    """Return the least and the largest of some numbers of bytes as text for people."""
    low, high = min(sizes), max(sizes)
    return size_text(high) if low == high else f"{size_text(low)} to {size_text(high)}"


def differences(names: Iterable[str], measured: Iterable[Difference]) -> Table:
    """Return a table of outputs and their differences from one device."""
    table = titled("against one device", "output", right=("largest difference", "allowed"))
    table.add_column("")
    for name, d in zip(names, measured, strict=True):
        verdict = Text("within", "green") if d.is_allowed else Text("DIFFERS", "bold red")
        table.add_row(f"%{name}", f"{d.largest:.2g}", f"{d.allowed:.2g}", verdict)
    return table


def layout_pictures(definition: FusionDefinition) -> list[str]:
    """Return a picture of each layout of a definition, with the values that lie so."""
    program = compile(definition)
    if definition.examples:
        program = program.with_extents(definition.examples)
    return [
        f"\n{text}: {Picture(layout, shape)}"
        for text, shape, layout in by_layout(values_of(program.fusion))
    ]


def program_text(program: str) -> Text:
    """Return a printed program in colours: communications stand out, source lines are dim."""
    text = Text(program)
    text.highlight_regex(r"(?m)#.*$", "dim")
    text.highlight_regex(r"(?m)%\S+ = post .*?(?=\s+#|$)", "bold cyan")
    return text
