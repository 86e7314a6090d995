"""The command `mdfuse report`: a program on one page of HTML."""

from __future__ import annotations

from pathlib import Path

from mdfuse.cli import screen
from mdfuse.cli.costs import costs_named
from mdfuse.cli.program_file import call_build, load_build
from mdfuse.compiled.program import compile
from mdfuse.errors import ProgramError
from mdfuse.mesh import DeviceMesh
from mdfuse.runs.extents import global_extents
from mdfuse.seeing.costs import UNIT
from mdfuse.seeing.report.numbers import size_text
from mdfuse.seeing.report.page import Subject, html, values_of
from mdfuse.seeing.traces import last_run


def write(file: Path, mesh: DeviceMesh, out: Path, costs: str | None, trace: Path | None) -> None:
    """Write the report of a program.

    Args:
        file: defines `build`.
        mesh: to build the program for.
        out: the file, which is replaced.
        costs: a table of costs for predicted times.
        trace: a folder of a traced run of this program, whose last run is shown beside.

    Raises:
        MdfuseError: the program cannot be built; there is no such trace; the file cannot be
            written.
    """
    table = costs_named(costs) or UNIT
    with screen.progress("building"):
        definition, inputs = call_build(load_build(file), mesh)
        program = compile(definition)
        text = str(definition)
        if definition.examples:
            program = program.with_extents(global_extents(definition.fusion, inputs))
    with screen.progress("drawing"):
        measured = last_run(trace, program.host.name) if trace is not None else []
        page = html(
            Subject(
                host=program.host,
                definition=text,
                segments=[str(s.fusion) for s in program.segments],
                explained=program.explain(),
                values=values_of(program.fusion),
                costs=table,
                measured=measured,
                schedule=program.schedule,
            )
        )
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ProgramError(
            f"{out} cannot be written", because=str(error), hint="pass another file with -o"
        ) from error
    screen.output().print(f"{out}: {size_text(len(page.encode()))}")
