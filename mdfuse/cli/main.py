"""The commands of `mdfuse`."""

from __future__ import annotations

import runpy
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mdfuse
from mdfuse.cli import screen
from mdfuse.errors import MeshError, ProgramError
from mdfuse.mesh import DeviceMesh

if TYPE_CHECKING:
    from mdfuse.frontend.definition import FusionDefinition

# torch is slow to import, so that commands import modules that need it themselves

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

traces = typer.Typer(no_args_is_help=True, help="Traces of runs (MDFUSE_TRACE=FOLDER).")
app.add_typer(traces, name="trace")

File = Annotated[
    Path,
    typer.Argument(
        exists=True,
        dir_okay=False,
        metavar="FILE.py",
        help="Defines build(mesh) -> (FusionDefinition, global_inputs).",
    ),
]

MeshOption = Annotated[
    str, typer.Option(metavar="dp=2,tp=4", help="The mesh to build the program for.")
]
CostsOption = Annotated[
    str | None,
    typer.Option(metavar="h100", help="Predict times: here, h100, unit, or a JSON file."),
]


class Stage(StrEnum):
    """The stage of lowering at which a program is shown."""

    FUSION = "fusion"
    LAYOUTS = "layouts"
    SEGMENTS = "segments"
    HOST = "host"


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"mdfuse {mdfuse.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """One tensor program in global view, one inspectable program per rank."""
    screen.prepare()


@app.command()
def run(
    file: File,
    sim: Annotated[
        str | None,
        typer.Option(metavar="dp=2,tp=4", help="Simulate every rank of this mesh in this process."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="dp=2,tp=2",
            help="The mesh over the launched ranks; by default one axis tp over all of them.",
        ),
    ] = None,
) -> None:
    """Run a program on the launched ranks, or simulate it, and compare it with one device.

    Start it with a launcher; without one, and without --sim, it is one rank:
      torchrun --nproc-per-node 4 -m mdfuse run FILE.py
      mpirun -n 4 python -m mpi4py -m mdfuse run FILE.py
    """
    if sim is not None and mesh is not None:
        raise typer.BadParameter("--sim names the mesh already", param_hint="--mesh")
    simulated, launched = _mesh(sim, "--sim"), _mesh(mesh, "--mesh")
    with screen.errors():
        from mdfuse.cli import run_command
        from mdfuse.cli.program_file import load_build

        build = load_build(file)
        if simulated is not None:
            run_command.simulate(build, simulated)
        else:
            run_command.launch(build, launched, str(file))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    }
)
def launch(
    context: typer.Context,
    count: Annotated[int, typer.Option("-n", min=1, metavar="N", help="The number of ranks.")],
    respawn: Annotated[
        bool,
        typer.Option("--respawn", help="Start a new process in the place of a rank that is lost."),
    ] = False,
) -> None:
    """Start a program on ranks of this host, and leave those alone that outlive others.

    The launcher keeps the store in which ranks find each other, on loopback, so that ranks can go
    on (mdfuse.rebuild) whichever of them dies. It says who died, and of which signal:
      mdfuse launch -n 4 FILE.py --lr 0.1
      mdfuse launch -n 4 --respawn -- -m package.train
    """
    with screen.errors():
        from mdfuse.cli import launching

        status = launching.launch(count, context.args, respawn)
    if status:
        raise typer.Exit(status)


@app.command()
def dump(
    file: File,
    mesh: MeshOption = "tp=4",
    rank: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Show what this rank runs (stage host)."),
    ] = None,
    stage: Annotated[Stage, typer.Option(metavar="STAGE", help="How far to lower.")] = Stage.HOST,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Show a picture of each layout as well.")
    ] = False,
) -> None:
    """Show a program; nothing runs.

    The stages:
      fusion    as defined, with the stated layouts
      layouts   every value's layout
      segments  after all passes, every reshard a set
      host      what the ranks execute
    """
    if rank is not None and stage is not Stage.HOST:
        raise typer.BadParameter("only the stage host differs by rank", param_hint="--rank")
    chosen = _mesh(mesh, "--mesh")
    assert chosen is not None
    with screen.errors():
        from mdfuse.cli.program_file import call_build, load_build
        from mdfuse.cli.rich_tables import layout_pictures, program_text

        with screen.progress("building"):
            definition, inputs = call_build(load_build(file), chosen)
            text = program_text(_stage_text(definition, inputs, stage, rank))
            drawn = layout_pictures(definition) if pictures else []
        for part in (text, *drawn):
            screen.output().print(part, soft_wrap=True)


@app.command()
def diff(
    file: File,
    other: Annotated[
        Path | None,
        typer.Argument(exists=True, dir_okay=False, metavar="OTHER.py", help="The second file."),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(metavar="dp=8", help="The mesh of both programs, or, twice, of each."),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'w*=(tp=S0)'",
            help="Layouts of inputs in the second program, or, twice, of each; several with ;",
        ),
    ] = None,
    costs: CostsOption = None,
    full: Annotated[bool, typer.Option("--full", help="Compare types of values, too.")] = False,
) -> None:
    """Show two programs beside each other: communications, memory, times, and what differs.

    One file with two meshes, one file with other layouts, or two files:
      mdfuse diff FILE.py --mesh dp=8 --mesh fsdp=4,tp=2
      mdfuse diff FILE.py --mesh tp=4 --layout 'w1=(tp=S1)'
      mdfuse diff FILE.py OTHER.py --mesh tp=4
    """
    texts, layouts = mesh or ["tp=4"], layout or []
    for given, option in ((texts, "--mesh"), (layouts, "--layout")):
        if len(given) > 2:
            raise typer.BadParameter("there are two programs", param_hint=option)
    if other is None and len(texts) < 2 and not layouts:
        why = "one file needs it twice, or another --layout"
        raise typer.BadParameter(why, param_hint="--mesh")
    meshes = [m for m in (_mesh(text, "--mesh") for text in texts) if m is not None]
    with screen.errors():
        from mdfuse.cli import differing

        placed = ["", *layouts][-2:] if layouts else ["", ""]
        pairs = zip((file, other or file), (meshes[0], meshes[-1]), placed, strict=True)
        differing.show([differing.ProgramSource(*pair) for pair in pairs], costs, full)


@app.command()
def report(
    file: File,
    mesh: MeshOption = "tp=4",
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.html", help="The page.")] = Path(
        "report.html"
    ),
    costs: CostsOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, metavar="FOLDER", help="A traced run, to be shown beside."),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Take the batch in so many parts; needs --batch."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="x=0,t=0", help="The dims of inputs that are the batch's.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="1f1b", help="Of the stages: a name, or a CSV file.")
    ] = None,
) -> None:
    """Write a program as one page of HTML: layouts, communications, memory, timeline."""
    chosen = _mesh(mesh, "--mesh")
    assert chosen is not None
    if (microbatches is None) != (batch is None) or (schedule and not batch):
        raise typer.BadParameter("microbatches and a batch go together", param_hint="--batch")
    with screen.errors():
        from mdfuse.cli import reporting
        from mdfuse.cli.program_file import parse_batch

        asked = None
        if microbatches is not None and batch is not None:
            asked = reporting.Microbatches(
                count=microbatches, batch=parse_batch(batch), schedule=schedule
            )
        reporting.write(file, chosen, out, costs, trace, asked)


@traces.command()
def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            metavar="TRACE",
            help="Folders of traced runs; Chrome trace JSON, as torch's profiler writes it.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.json", help="The merged trace.")
    ] = Path("trace.json"),
) -> None:
    """Merge traces by one clock into a file for https://ui.perfetto.dev."""
    with screen.errors():
        from mdfuse.cli.trace_command import merged

        merged(paths, out)


@app.command()
def doctor(
    collective: Annotated[
        bool,
        typer.Option("--collective", help="Let all launched ranks communicate, and measure it."),
    ] = False,
) -> None:
    """Show versions, launcher, devices, links, libraries and backends, each with its remedy.

    Exit status 1: something keeps programs from running. What ranks see:
      torchrun --nproc-per-node 4 -m mdfuse doctor --collective
    """
    with screen.errors():
        from mdfuse.cli.doctor.ranks import run

        run(collective)


@app.command()
def calibrate(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE.json", help="Elsewhere than programs look."),
    ] = None,
) -> None:
    """Measure in about a minute what work and communications take here, for predicted times.

    Start it as programs are started, on a machine that does nothing else:
      torchrun --nproc-per-node 2 -m mdfuse calibrate
    Predictions with --costs here follow it.
    """
    with screen.errors():
        from mdfuse.cli.calibration.command import run

        run(out)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A file of benchmarks/, without .py.")
    ],
) -> None:
    """Run a benchmark of benchmarks/; further arguments are its own."""
    benchmarks = _benchmarks()
    if name not in benchmarks:
        known = ", ".join(sorted(benchmarks)) or "none here; run it in a checkout of mdfuse"
        raise typer.BadParameter(f"no benchmark {name!r}. There are: {known}", param_hint="NAME")
    sys.argv = [str(benchmarks[name]), *context.args]
    sys.path.insert(0, str(benchmarks[name].parent))
    with screen.errors():
        from mdfuse.cli.user_code import user_code

        status = 0
        with user_code(benchmarks[name].name, f"the benchmark {name}"):
            try:
                runpy.run_path(str(benchmarks[name]), run_name="__main__")
            except SystemExit as end:  # a benchmark sets its own exit status
                status = _status(end)
    if status:
        raise typer.Exit(status)


def _status(end: SystemExit) -> int:
    """Print what a `SystemExit` says, and return its exit status, as Python does."""
    if isinstance(end.code, int | None):
        return end.code or 0
    typer.echo(end.code, err=True)
    return 1


def _mesh(text: str | None, option: str) -> DeviceMesh | None:
    """Return the mesh of an option, None without one; a text that is no mesh is a usage error."""
    if text is None:
        return None
    from mdfuse.cli.program_file import parse_mesh

    try:
        return parse_mesh(text)
    except MeshError as error:
        why = ": ".join(filter(None, (error.what, error.hint)))
        raise typer.BadParameter(why, param_hint=option) from error


def _stage_text(
    definition: FusionDefinition, inputs: list[Any], stage: Stage, rank: int | None
) -> str:
    """Return the text of a stage; a rank's program is the one for the extents of the inputs."""
    from mdfuse.compiled.program import compile
    from mdfuse.runs.extents import global_extents

    match stage:
        case Stage.FUSION:
            return str(definition.fusion)
        case Stage.LAYOUTS:
            return str(definition)
        case Stage.SEGMENTS:
            return "\n\n".join(str(part.fusion) for part in compile(definition).segments)
        case Stage.HOST:
            program = compile(definition)
            if rank is None:
                return str(program)
            if rank > program.host.last_rank:
                raise ProgramError(
                    f"rank {rank} of a program for ranks 0 to {program.host.last_rank}",
                    hint="choose a rank of its meshes, or a larger --mesh",
                )
            return str(program.for_rank(rank, global_extents(definition.fusion, inputs)))


def _benchmarks() -> dict[str, Path]:
    """Return benchmarks by name, of the current folder or else of this package's checkout."""
    for root in (Path.cwd(), Path(__file__).parents[2]):
        files = {p.stem: p for p in (root / "benchmarks").glob("*.py") if p.stem[0] != "_"}
        if files:
            return files
    return {}
