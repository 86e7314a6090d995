"""Examine one process and its host."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mdfuse.bootstrap import detect
from mdfuse.cli.doctor import findings, gpus, host, libraries
from mdfuse.cli.doctor.findings import Finding
from mdfuse.cli.rich_tables import titled
from mdfuse.config import HELPERS, VARIABLES, backend_choice, options_from_environment
from mdfuse.errors import BackendError, ProgramError
from mdfuse.runtime.backend_rows import BACKENDS, auto, why_not

#: Variables shown beside mdfuse's own: they steer the libraries below.
_SHOWN = (
    "NCCL_",
    "UCX_",
    "UCC_",
    "GLOO_",
    "OMPI_MCA_",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_NCCL_",
)


def examine(console: Console) -> list[str]:
    """Print everything about this process and its host.

    Returns:
        The problems that keep programs from running, one line each.
    """
    linked, matrix = gpus.links()
    checks = [
        *libraries.versions(),
        *launcher(os.environ),
        *gpus.findings(),
        *linked,
        *libraries.findings(os.environ),
        *host.findings(os.environ),
        *variables(os.environ),
        *settings(),
    ]
    console.print(findings.table(checks))
    if matrix is not None:
        console.print(matrix)
    console.print(_backends())
    return findings.problems(checks)


def launcher(environment: Mapping[str, str]) -> list[Finding]:
    """Return which launcher started this process, and the evidence for it."""
    try:
        launch = detect(environment)
    except BackendError as error:
        return [Finding(name="launcher", what=error.what, remedy=error.hint, is_problem=True)]
    who = f"rank {launch.rank} of {launch.size}, local rank {launch.local_rank}"
    return [
        Finding(name="launcher", what=f"{launch.name}: {who}"),
        Finding(name="", what=f"because {launch.why}"),
    ]


def variables(environment: Mapping[str, str]) -> list[Finding]:
    """Return the variables that are set and steer mdfuse or a library below it."""
    names = sorted(n for n in environment if n in (*VARIABLES, HELPERS) or n.startswith(_SHOWN))
    return [Finding(name=name, what=environment[name]) for name in names]


def settings() -> list[Finding]:
    """Check that mdfuse's own variables can be read, and the backends they name can be used."""
    try:
        names = backend_choice(options_from_environment().backend).names
    except ProgramError as error:
        remedy = error.because or error.hint
        return [Finding(name="settings", what=error.what, remedy=remedy, is_problem=True)]
    return [finding for name in names for finding in _setting(name)]


def _setting(name: str) -> list[Finding]:
    """Return whether a backend that the user named can be used; for "auto", which one it is."""
    if name == "auto":
        chosen, why = auto()
        return [Finding(name="backend", what=f"auto: {chosen}, because {why}")]
    refusal = why_not(name)
    if refusal is None:
        return [Finding(name="backend", what=f"{name}, because MDFUSE_BACKEND names it")]
    what = f"{name} is not usable: {refusal[0]}"
    return [Finding(name="MDFUSE_BACKEND", what=what, remedy=refusal[1], is_problem=True)]


def of_other_ranks() -> list[str]:
    """Return problems on a rank other than 0, from fast checks that may differ by host."""
    checks = [*launcher(os.environ), *host.findings(os.environ), *settings()]
    return findings.problems(checks)


def _backends() -> Table:
    table = titled("backends", "name", "tensors on", "usable")
    table.add_column("why not, and the remedy", overflow="fold")
    for name, row in BACKENDS.items():
        refusal = row.why_not()
        usable = Text("no", "yellow") if refusal else Text("yes", "green")
        remedy = f"{refusal[0]}; {refusal[1]}" if refusal else ""
        table.add_row(name, " ".join(row.devices), usable, Text(remedy))
    return table
