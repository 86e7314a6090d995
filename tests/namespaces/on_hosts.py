"""How the scripts of this folder are called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """250 seconds, then whatever still runs on the hosts is killed."""
    command = ["timeout", "--kill-after", "10", "250", FOLDER / script, *arguments]
    settings = {"MDFUSE_PYTHON": sys.executable, "NO_COLOR": "1", "COLUMNS": "120"}
    settings |= {"MDFUSE_TIMEOUT_S": "60", **environment}
    return subprocess.run(
        command,
        env={**os.environ, **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",  # pytest-mpi prints a version with a zero byte
    )
