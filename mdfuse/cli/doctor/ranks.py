"""The command `mdfuse doctor`; with `--collective` all ranks meet, compare, and communicate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.cli.doctor import collective
from mdfuse.cli.doctor.collective import SIZES, Measured
from mdfuse.cli.doctor.examination import examine, of_other_ranks
from mdfuse.config import Options, backend_choice, options_from_environment
from mdfuse.runtime.backend_rows import BACKENDS, why_not
from mdfuse.runtime.communicator import Communicator, init
from mdfuse.runtime.null_world import NULL

#: Deadline of a communication of the check, seconds, where MDFUSE_TIMEOUT_S is not set.
_TIMEOUT_S = 60.0

#: The backend by which ranks compare their libraries: it works everywhere.
_MEETING = "gloo"


def run(is_collective: bool) -> None:
    """Print the findings on this machine, and with `is_collective` let all ranks communicate.

    Raises:
        SystemExit: status 1 where something keeps programs from running.
    """
    console = screen.output()
    problems = examine(console) if screen.is_first() else of_other_ranks()
    if is_collective:
        problems = check_ranks(console, problems)
    if problems:
        lines = "\n".join(["problems:", *(f"  {line}" for line in problems)])
        screen.fail(lines, everywhere=not is_collective)
    console.print("no problem found")


def check_ranks(console: Console, local: Sequence[str], sizes: Sequence[int] = SIZES) -> list[str]:
    """Let all ranks communicate by every backend that all of them can use; all ranks call it.

    Where MDFUSE_BACKEND names backends, only these are used.

    Args:
        console: where the table of times goes.
        local: problems that this rank found by itself; if any rank has one, nothing is measured.
        sizes: bytes per communication.

    Returns:
        The problems, the same lines on all ranks.

    Raises:
        BackendError: the ranks do not find each other.
        CommunicationError: a communication broke or did not finish.
    """
    launch = detect(os.environ)
    if launch.size == 1:
        few = f"--collective needs at least two ranks, and this is {launch.name}: {launch.why}"
        return [*local, f"{few}; torchrun --nproc-per-node 2 -m mdfuse doctor --collective"]
    options = _options()
    problems, usable = _meet(options, local)
    if problems:
        return problems
    measured: list[Measured] = []
    for name in usable:
        times, wrong = _measure(options, name, sizes)
        measured += times
        problems += wrong
    console.print(collective.table(measured))
    return problems


def _options() -> Options:
    options = options_from_environment()
    is_set = "MDFUSE_TIMEOUT_S" in os.environ
    return options if is_set else replace(options, timeout_s=_TIMEOUT_S)


def _meet(options: Options, local: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the problems of all ranks, and the backends that all of them can use."""
    comm = init(options, backend=_MEETING)
    try:
        texts = comm.all_ok("; ".join(local) or None)
        names = backend_choice(options.backend).names
        named = BACKENDS if "auto" in names else dict.fromkeys(names)
        real = [name for name in named if name != NULL]
        usable = [name for name in real if not any(_refusals(comm, name))]
    finally:
        comm.close()
    problems = [f"rank {r}: {text}" for r, text in enumerate(texts) if text]
    if not usable:
        problems.append(f"backend {options.backend}: nothing that all ranks could communicate by")
    return problems, usable


def _refusals(comm: Communicator, name: str) -> tuple[str | None, ...]:
    refusal = why_not(name)
    return comm.all_ok(None if refusal is None else refusal[0])


def _measure(options: Options, name: str, sizes: Sequence[int]) -> tuple[list[Measured], list[str]]:
    comm = init(options, backend=name)
    try:
        with screen.progress(f"measuring {name}"):
            times = collective.measure(comm, sizes)
        return times, collective.wrong_values(comm, times)
    finally:
        comm.close()
