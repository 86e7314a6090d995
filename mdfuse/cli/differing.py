"""The command `mdfuse diff`: two programs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from mdfuse.cli import screen
from mdfuse.cli.named_costs import costs_named
from mdfuse.cli.program_file import call_build, load_build
from mdfuse.cli.rich_tables import size_range, time_text, titled
from mdfuse.cli.stated_layouts import parse_layouts, placed
from mdfuse.compiled.program import Program, compile, lowered
from mdfuse.hir.program import HostProgram
from mdfuse.mesh import DeviceMesh
from mdfuse.runs.extents import global_extents
from mdfuse.seeing.comparison import Account, account, differing_text, groups_of


@dataclass(frozen=True, slots=True)
class ProgramSource:
    """The source of a program.

    Attributes:
        file: defines `build`.
        mesh: to build the program for.
        layouts: of some inputs, as text; "": all as the file has them.
    """

    file: Path
    mesh: DeviceMesh
    layouts: str = ""


def compiled(source: ProgramSource) -> Program:
    """Return the program of a source, with numbers for all extents.

    Raises:
        MdfuseError: it cannot be built, or compiled.
    """
    definition, inputs = call_build(load_build(source.file), source.mesh)
    if source.layouts:
        program = lowered(placed(definition.named, parse_layouts(source.layouts)))
    else:
        program = compile(definition)
    if definition.examples:
        program = program.with_extents(global_extents(definition.fusion, inputs))
    return program


def show(sources: Sequence[ProgramSource], costs: str | None, is_full: bool) -> None:
    """Print two programs beside each other.

    Args:
        sources: two.
        costs: a table of costs, for predicted times; None: none are printed.
        is_full: whether the texts are compared with the types of all values.
    """
    table = costs_named(costs)
    accounts: list[Account] = []
    for source, label in zip(sources, labels(sources), strict=True):
        with screen.progress(f"compiling {label}"):
            accounts.append(account(label, compiled(source).host, table))
    console = screen.output()
    console.print(facts(accounts))
    console.print(communications(accounts))
    a, b = accounts
    lines = differing_text(a, b, is_full)
    console.print(coloured(lines) if lines else "the instructions are the same", soft_wrap=True)


def labels(sources: Sequence[ProgramSource]) -> list[str]:
    """Return labels of programs: the files, meshes or layouts in which they differ."""
    names = [s.file.name for s in sources]
    if len({*names}) == 1:
        names = [str(s.file) for s in sources]
    axes = (zip(s.mesh.axes, s.mesh.shape, strict=True) for s in sources)
    meshes = [",".join(f"{axis}={n}" for axis, n in of_one) for of_one in axes]
    layouts = [s.layouts or "as written" for s in sources]
    columns = [texts for texts in (names, meshes, layouts) if len({*texts}) > 1] or [meshes]
    return [" ".join(row) for row in zip(*columns, strict=True)]


def facts(accounts: Sequence[Account]) -> Table:
    """Return a table of the figures that are one number for each program."""
    table = titled("", "", right=[a.label for a in accounts])
    table.add_row("ranks", *(str(sum(1 for _ in _ranks(a.host))) for a in accounts))
    table.add_row("instructions", *(str(len(a.host)) for a in accounts))
    table.add_row("peak memory of a rank", *(size_range(a.peaks) for a in accounts))
    times = [a.seconds for a in accounts]
    if all(t is not None for t in times):
        table.add_row("predicted time", *(time_text(t) for t in times if t is not None))
    return table


def _ranks(host: HostProgram) -> set[int]:
    return {rank for mesh in host.meshes for rank in mesh}


def communications(accounts: Sequence[Account]) -> Table:
    """Return a table of communications by kind and axis: counts, and bytes that a rank receives."""
    right = [text for a in accounts for text in ("count", a.label)]
    table = titled("communications per run, bytes received per rank", "kind", "axis", right=right)
    for group in groups_of(accounts):
        cells = []
        for a in accounts:
            traffic = a.traffic.get(group)
            cells += ["-", "-"] if traffic is None else _cells(traffic.times, traffic.bytes)
        table.add_row(*group, *cells)
    table.add_section()
    totals = [text for a in accounts for text in _cells(a.total.times, a.total.bytes)]
    table.add_row("all", "", *totals)
    return table


def _cells(times: Sequence[int], sizes: Sequence[int]) -> list[str]:
    return [str(max(times)), size_range(sizes)]


def coloured(lines: Sequence[str]) -> Text:
    """Return a unified diff in colours."""
    text = Text("\n".join(lines))
    text.highlight_regex(r"(?m)^\+.*$", "green")
    text.highlight_regex(r"(?m)^-.*$", "red")
    text.highlight_regex(r"(?m)^@@.*$", "dim")
    return text
