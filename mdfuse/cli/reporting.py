"""The command `mdfuse report`: a program on one page of HTML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mdfuse.cli import screen
from mdfuse.cli.named_costs import costs_named
from mdfuse.cli.program_file import call_build, load_build
from mdfuse.compiled.pipeline import pipeline
from mdfuse.compiled.program import Program, compile
from mdfuse.errors import ProgramError
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.mesh import DeviceMesh
from mdfuse.pipelines.schedules import Schedule
from mdfuse.runs.extents import global_extents
from mdfuse.seeing.costs import UNIT
from mdfuse.seeing.report.numbers import size_text
from mdfuse.seeing.report.page import Subject, html, values_of
from mdfuse.seeing.traces import last_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """Arguments of `mf.pipeline` on the batch."""

    count: int
    batch: dict[str, int]
    schedule: str | None


def write(
    file: Path,
    mesh: DeviceMesh,
    out: Path,
    costs: str | None,
    trace: Path | None,
    microbatches: Microbatches | None = None,
) -> None:
    """Write the report of a program.

    Args:
        file: defines `build`.
        mesh: to build the program for.
        out: the file, which is replaced.
        costs: a table of costs for predicted times.
        trace: a folder of a traced run of this program, whose last run is shown beside.
        microbatches: in which the batch is taken; None: all at once.

    Raises:
        MdfuseError: the program cannot be built; there is no such trace; the file cannot be
            written.
    """
    table = costs_named(costs) or UNIT
    with screen.progress("building"):
        definition, inputs = call_build(load_build(file), mesh)
        program = _compiled(definition, microbatches)
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


def _compiled(definition: FusionDefinition, asked: Microbatches | None) -> Program:
    if asked is None:
        return compile(definition)
    name = asked.schedule
    wanted = Schedule.from_csv(name) if name is not None and name.endswith(".csv") else name
    return pipeline(definition, microbatches=asked.count, batch=asked.batch, schedule=wanted)
