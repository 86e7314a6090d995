"""The command `mdfuse run`: load, run or simulate, compare, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import mdfuse
from mdfuse.bootstrap import Launch, detect
from mdfuse.cli import rich_tables, screen
from mdfuse.cli.launched_runs import Outcome, compare, run_on_ranks, run_simulated
from mdfuse.cli.program_file import Build, call_build, parse_mesh
from mdfuse.compiled.program import Program, compile, headline
from mdfuse.errors import ProgramError, counted
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.mesh import DeviceMesh
from mdfuse.runs.extents import global_extents
from mdfuse.runtime.communicator import init


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    definition: FusionDefinition
    inputs: Sequence[Any]
    program: Program


def run_build(build: Build, alone: str = "tp=4") -> None:
    """Do as `mdfuse run` from within a running script; without a launcher, simulate.

    Args:
        build: `build(mesh) -> (definition, global inputs)`.
        alone: the mesh to simulate where no launcher started this process.
    """
    with screen.errors():
        if detect(os.environ).size == 1:
            simulate(build, parse_mesh(alone))
        else:
            launch(build, None, Path(sys.argv[0]).name)


def simulate(build: Build, mesh: DeviceMesh) -> None:
    """Simulate every rank of a mesh in this process; of several processes only rank 0 does.

    Raises:
        SystemExit: status 1 where an output differs from one device.
    """
    if not screen.is_first():
        return
    job = _compiled(build, mesh)
    ranks = job.program.host.last_rank + 1
    with screen.progress(f"simulating {counted(ranks, 'rank')}"):
        outcome = run_simulated(job.program, job.inputs)
    time = rich_tables.time_text(outcome.median)
    rows = [
        ("mesh", str(mesh)),
        ("ranks", f"{ranks}, simulated in this process"),
        ("time", f"{time} for all ranks, one after another: no measure of real ones"),
    ]
    problem = _report(job, job.inputs, outcome, rows)
    if problem is not None:
        screen.fail(problem)


def launch(build: Build, mesh: DeviceMesh | None, name: str) -> None:
    """Run a program on the ranks that a launcher started; all of them call it.

    Args:
        build: makes the program and its inputs, alike on all ranks.
        mesh: by default one axis `tp` over all ranks.
        name: the program's file, for messages.

    Raises:
        ProgramError: the mesh has more ranks than there are.
        SystemExit: status 1 where an output differs from one device.
    """
    started = detect(os.environ)
    mesh = mesh or DeviceMesh.arange(tp=started.size)
    _check_fits(mesh, started, name)
    job = _compiled(build, mesh)
    comm = init()
    with screen.progress(f"running on {counted(started.size, 'rank')}"):
        outcome = run_on_ranks(job.program, job.inputs, comm)
    time = rich_tables.time_text(outcome.median)
    rows = [
        ("mesh", str(mesh)),
        ("ranks", f"{started.size}, {_started(started)}"),
        ("backend", f"{comm.backend} on {comm.device.type}"),
        ("time", f"{time}, median of {counted(len(outcome.seconds), 'run')} on rank 0"),
    ]
    problem = None
    if comm.rank == 0:
        inputs = [x.to(comm.device) if isinstance(x, Tensor) else x for x in job.inputs]
        problem = _report(job, inputs, outcome, rows)
    if any(comm.all_ok(problem)):
        screen.fail(problem or "")


def _started(launch: Launch) -> str:
    return launch.why if launch.name == "single" else f"started by {launch.name} ({launch.why})"


def _check_fits(mesh: DeviceMesh, launch: Launch, name: str) -> None:
    if mesh.last_rank < launch.size:
        return
    axes = ",".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.shape, strict=True))
    there = "is 1 process" if launch.size == 1 else f"are {launch.size} processes"
    raise ProgramError(
        f"{mesh} has {counted(mesh.size, 'rank')}, but there {there}",
        where=f"launcher {launch.name}: {launch.why}",
        because="every rank of a mesh is one process",
        hint=f"torchrun --nproc-per-node {mesh.size} -m mdfuse run {name} --mesh {axes}, "
        f"or mdfuse run {name} --sim {axes}",
    )


def _compiled(build: Build, mesh: DeviceMesh) -> _Job:
    with screen.progress("building"):
        definition, inputs = call_build(build, mesh)
        _check_have_values(inputs)
    with screen.progress("compiling"):
        program = compile(definition)
        if definition.examples:
            program = program.with_extents(global_extents(definition.fusion, inputs))
        return _Job(definition=definition, inputs=inputs, program=program)


def _check_have_values(inputs: Sequence[Any]) -> None:
    for n, x in enumerate(inputs):
        if isinstance(x, Tensor) and x.is_meta:
            raise ProgramError(
                f"input {n} of build has no values: it is on the meta device",
                because="the outputs are compared with what one device computes",
                hint="return tensors with values; mdfuse dump needs none",
            )


def _report(
    job: _Job, inputs: Sequence[Any], outcome: Outcome, rows: list[tuple[str, str]]
) -> str | None:
    """Print everything about a run; return the problem with its outputs, or None."""
    program = job.program
    with screen.progress("computing on one device"):
        differences = compare(outcome.outputs, mdfuse.debug.reference(job.definition, inputs))
    console = screen.output()
    console.print(rich_tables.facts([("program", headline(program)), *rows]))
    console.print()
    console.print(rich_tables.communications(program))
    console.print(rich_tables.differences(program.host.outputs, differences))
    wrong = [n for n, d in zip(program.host.outputs, differences, strict=True) if not d.is_allowed]
    return f"differs from one device: {', '.join(wrong)}" if wrong else None
