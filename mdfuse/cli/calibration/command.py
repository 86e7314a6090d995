"""The command `mdfuse calibrate`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.table import Table

from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.cli.calibration.held_out import COUNT, errors, programs, seconds_pair
from mdfuse.cli.calibration.measuring import Measurements
from mdfuse.cli.calibration.microbenchmarks import OPTIONS
from mdfuse.cli.calibration.scales import CPU, GPU, Scale
from mdfuse.cli.calibration.sending import Backends, ways
from mdfuse.cli.calibration.suite import points
from mdfuse.cli.rich_tables import size_text, time_text, titled
from mdfuse.config import BETWEEN_MESHES, options_from_environment
from mdfuse.errors import BackendError, ProgramError
from mdfuse.files import private_folder
from mdfuse.interpreter.garbage import quick_collections
from mdfuse.plan.progress_bar import progress
from mdfuse.runtime.alone import by_itself
from mdfuse.runtime.communicator import Communicator, init
from mdfuse.seeing.amounts import QUERIES
from mdfuse.seeing.cost_tables import CostTable, file_name, folder, machine_of
from mdfuse.seeing.costs import Costs

#: The largest spread of the times of one piece of work with which a table is written.
MOST_SPREAD = 0.2


def run(out: Path | None) -> None:
    """Measure this machine, and write the table; all ranks call it.

    Args:
        out: the file; None: where programs look for it.

    Raises:
        ProgramError: the machine is too noisy, or the file cannot be written. Rank 0 says so, and
            all ranks end.
    """
    comm = init()
    try:
        table = calibrated(comm)
        wrong = refusal(table)
        if wrong is None and comm.rank == 0:
            path = out or folder() / file_name(table.machine, table.ranks)
            wrong = _written(path, table)
        console = screen.output()
        shown = [kinds(table.costs), judged(table)]
        if table.costs.links:
            shown.insert(1, communications(table.costs))
        for part in shown:
            console.print(part)
        if any(comm.all_ok(str(wrong) if wrong is not None else None)):
            raise wrong or ProgramError("rank 0 wrote no table")
        if comm.rank == 0:
            console.print(f"{path}: {table.text}", soft_wrap=True)
    finally:
        comm.close()


def calibrated(comm: Communicator, scale: Scale | None = None) -> CostTable:
    """Return the table of a communicator's machine, measured now; all ranks call it.

    Args:
        comm: the ranks.
        scale: the sizes and repeats; by default those for its devices.
    """
    scale = scale or _scale(comm)
    console = screen.output()
    backends = carriers(comm, console.print)
    alone = by_itself(comm) if comm.size > 1 else None
    measured = Measurements(comm, scale, console.print, backends, alone=alone)
    total = points(scale, comm.size, backends) + COUNT + len(ways(comm.size, backends))
    shown = progress("calibrating", total, shows=comm.rank == 0)
    measured.begin()
    with quick_collections(), shown as advance:
        measured.take(advance)
        start = time.perf_counter()
        costs, held_out = measured.costs, dict[str, tuple[float, float]]()
        for program in programs(scale, comm.size, backends[None]):
            held_out[program.host.name] = seconds_pair(comm, program, costs)
            advance()
    if alone is not None:
        alone.close()
    console.print(f"programs that it did not see: {time.perf_counter() - start:.1f} s")
    mean, p95 = errors(held_out.values())
    is_one_host = detect(os.environ).is_one_host
    return CostTable(
        costs=costs,
        machine=machine_of(comm.device, comm.backend, is_one_host),
        ranks=comm.size,
        date=datetime.now(UTC).date().isoformat(),
        mean_error=mean,
        p95_error=p95,
        held_out=held_out,
        spread=measured.spread,
    )


def _scale(comm: Communicator) -> Scale:
    if comm.device.type != "cuda":
        return CPU
    about = torch.cuda.get_device_properties(comm.device)
    return replace(GPU, multiprocessors=about.multi_processor_count, l2=about.L2_cache_size)


#: A backend that is measured beside the usual one, where ranks can use it.
_BESIDES = "symmetric"


def carriers(comm: Communicator, say: Callable[[str], object]) -> Backends:
    """Return the backends that are measured, and the options that name them; all ranks call it.

    A backend that MDFUSE_BACKEND names is measured alone.
    """
    backends: Backends = {None: replace(OPTIONS, backend=comm.backend)}
    is_named = options_from_environment().backend != "auto"
    if comm.size == 1 or is_named or not detect(os.environ).is_one_host:
        return backends
    try:
        comm.open([_BESIDES])
    except BackendError as error:
        say(f"{_BESIDES} is left out: {error.because or error.what}")
        return backends
    named = f"{comm.backend}, x={_BESIDES}, {BETWEEN_MESHES}={_BESIDES}"
    return {**backends, _BESIDES: replace(OPTIONS, backend=named)}


def refusal(table: CostTable) -> ProgramError | None:
    """Return the reason why a table is not to be written; None: there is none."""
    if table.spread <= MOST_SPREAD:
        return None
    return ProgramError(
        f"no table was written: this machine is too noisy ({table.spread:.0%})",
        because=f"the quartiles of the time of one product are more than {MOST_SPREAD:.0%} apart",
        hint="stop what else runs here, and calibrate again",
    )


def _written(path: Path, table: CostTable) -> ProgramError | None:
    """Write the file as a whole; return why it cannot be."""
    try:
        if path.parent == folder():  # beside compiled functions, which nobody else may write
            private_folder(path.parent.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(table.as_json() + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        return ProgramError(
            f"{path} cannot be written", because=str(error), hint="pass another file with --out"
        )
    return None


def kinds(costs: Costs) -> Table:
    """Return a table of the least and the greatest speed of each kind of work."""
    table = titled("what was measured", "kind", right=("least time", "largest size", "its speed"))
    table.add_row("run", time_text(costs.run_s), "", "")
    if costs.links:
        table.add_row("run that communicates", time_text(costs.run_s + costs.posting_s), "", "")
    for key, curve in costs.works.items():
        size, seconds = curve.points[-1]
        what, speed = size_text(round(size)), f"{size / seconds / 1e9:.4g} GB/s"
        if key.name == "query":
            what, speed = f"{size:.0f} keys", ""
        table.add_row(str(key), time_text(curve.points[0][1]), what, speed)
    for key, grid in costs.products.items():
        m, n, k = (axis[-1] for axis in grid.axes)
        speed = f"{2 * m * n * k / grid.times[-1] / 1e9:.4g} GFLOP/s"
        table.add_row(str(key), time_text(min(grid.times)), f"{m:.0f} x {n:.0f} x {k:.0f}", speed)
    for key, grid in costs.attentions.items():
        blocks, keys, features = (axis[-1] for axis in grid.axes)
        count = 4 * blocks * QUERIES * keys * features
        speed = f"{count / grid.times[-1] / 1e9:.4g} GFLOP/s"
        what = f"{count / 1e9:.3g} GFLOP"
        table.add_row(f"attention {key}", time_text(min(grid.times)), what, speed)
    return table


def communications(costs: Costs) -> Table:
    """Return a table of each kind of communication, by backends, and of work beside it."""
    right = ("least time", "largest size", "its speed", "work beside it is slower by")
    table = titled("communications", "kind and ranks", right=right)
    for key, link in costs.links.items():
        if link.curve is not None and key.kind != "*":
            size, seconds = link.curve.points[-1]
            speed, slower = f"{size / seconds / 1e9:.4g} GB/s", f"{link.slows:.1%}"
            least = time_text(link.curve.points[0][1])
            table.add_row(str(key), least, size_text(round(size)), speed, slower)
    return table


def judged(table: CostTable) -> Table:
    """Return a table of the programs that it was not fitted to."""
    title = (
        f"programs it did not see: off by {table.mean_error:.1%}, 95 % within {table.p95_error:.1%}"
    )
    rows = titled(title, "program", right=("predicted", "measured", "off by"))
    for name, (predicted, measured) in table.held_out.items():
        off = f"{predicted / measured - 1:+.1%}"
        rows.add_row(name, time_text(predicted), time_text(measured), off)
    return rows
