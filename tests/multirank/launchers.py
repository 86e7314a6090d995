"""How a plain pytest process starts the ranks of a world on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

_ENVIRONMENT = Path(__file__).parents[2] / "launch" / "one_node.env"

#: What a launcher tells its processes; a world that is hosted by one of them must not see it.
_OF_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "TORCHELASTIC_")
_OF_TORCHRUN = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}

Launcher = Callable[[int, list[str]], list[str]]


def mpirun(size: int, pytest_arguments: list[str]) -> list[str]:
    """Without -m mpi4py, a rank that raises leaves the others waiting for it for ever."""
    program = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi"]
    return [mpirun_program() or "mpirun", "-n", str(size), *program, *pytest_arguments]


def torchrun(size: int, pytest_arguments: list[str]) -> list[str]:
    """Standalone takes a free port; the loopback because a host's own name need not resolve."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    where = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(size)]
    return [*torchrun, *where, "-m", "pytest", *pytest_arguments]


#: By name, the preferred one first.
LAUNCHERS: dict[str, Launcher] = {"mpirun": mpirun, "torchrun": torchrun}


#: Backends that tests may be marked with: whether worlds that a launcher starts here have them.
_MARKED: dict[str, Callable[[Launcher], bool]] = {
    "mpi": lambda launcher: launcher is mpirun,
    "ucx": lambda launcher: launcher is torchrun,  # it knows no launcher: one is enough
    "symmetric": lambda launcher: launcher is torchrun,
}


def marked_backends(launcher: Launcher) -> set[str]:
    """The backends for which worlds are hosted besides the usual one."""
    return {name for name, is_there in _MARKED.items() if is_there(launcher)}


def choose_launcher(name: str) -> Launcher:
    """The launcher of that name; for "auto" mpirun where it and mpi4py are installed."""
    if name == "auto":
        name = "mpirun" if mpirun_program() and find_spec("mpi4py") else "torchrun"
    return LAUNCHERS[name]


def environment_of_ranks() -> dict[str, str]:
    """This process's environment, completed for ranks that share one machine."""
    own = {name: value for name, value in os.environ.items() if not _is_a_launchers(name)}
    lines = _ENVIRONMENT.read_text().splitlines()
    defaults = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return defaults | own


def _is_a_launchers(name: str) -> bool:
    return name in _OF_TORCHRUN or name.startswith(_OF_OTHER_LAUNCHERS)


def mpirun_program() -> str | None:
    """The mpirun beside this interpreter, which matches its mpi4py, else the one on the path."""
    beside = Path(sys.executable).parent
    return shutil.which("mpirun", path=str(beside)) or shutil.which("mpirun")
