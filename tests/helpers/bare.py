"""An environment without a launcher."""

from __future__ import annotations

import os

_PREFIXES = ("OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC_", "MDFUSE_", "MPI_")


_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def bare_environment() -> dict[str, str]:
    """This process's environment without what launchers set."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_PREFIXES) and name not in _NAMES
    }
