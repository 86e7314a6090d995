"""Programs under srun and sbatch, on a Slurm cluster of two hosts whose own names are loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from on_hosts import FOLDER, ROOT, run

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

ON_BOTH = ("--nodes=2", "--ntasks-per-node=2")


def srun(*command: str, mpi: str = "pmix", **environment: str) -> subprocess.CompletedProcess[str]:
    """Two ranks on each host, without a launch file."""
    settings = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    settings |= environment
    return run("slurm", "srun", *ON_BOTH, f"--mpi={mpi}", sys.executable, *command, **settings)


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_each_rank_is_told_who_it_is(mpi: str) -> None:
    program = (
        "import os, socket; from mdfuse.bootstrap import detect; l = detect(os.environ);"
        "print(l.name, l.rank, l.size, l.local_rank, socket.gethostname())"
    )
    done = srun("-c", program, mpi=mpi)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "srun 0 4 0 host0",
        "srun 1 4 1 host0",
        "srun 2 4 0 host1",
        "srun 3 4 1 host1",
    ]


@pytest.mark.parametrize("mpi", ["pmix", "none"])
def test_the_batch_file(mpi: str, tmp_path: Path) -> None:
    """The example compares itself with one device, and its exit status tells."""
    output = tmp_path / "output"
    numbers = (*ON_BOTH, "--cpus-per-task=2", f"--output={output}")
    program = ("launch/srun", "examples/tp_mlp.py")
    done = run("slurm", "sbatch", "--wait", *numbers, *program, MDFUSE_MPI=mpi)
    text = output.read_text() if output.exists() else ""
    assert done.returncode == 0, text + done.stderr
    assert "4, started by srun (" in text


# The names of tests stay clear of "mpi" alone, by which pytest-mpi picks its own.
@pytest.mark.parametrize("backend", ["gloo", "mpi", "ucx"], ids="on-{}".format)
def test_example(backend: str) -> None:
    """The example compares itself with one device, and its exit status tells."""
    done = srun("-m", "mpi4py", "examples/tp_mlp.py", MDFUSE_BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4, started by srun (" in done.stdout
    assert f"backend  {backend} on cpu" in done.stdout


def test_torchrun_as_one_task_per_host() -> None:
    agent = ("launch/torchrun_nodes", "2", "2", "10.213.0.1", "examples/tp_mlp.py")
    done = run("slurm", "srun", "--nodes=2", "--ntasks-per-node=1", *agent, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4, started by torchrun (" in done.stdout


def test_doctor() -> None:
    done = srun("-m", "mpi4py", "-m", "mdfuse", "doctor", "--collective")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "srun: rank 0 of 4, local rank 0" in done.stdout
    assert done.stdout.rstrip().endswith("no problem found")


def test_multi_rank_tests() -> None:
    """A rank that is in no world of four would run none of them, which is a failure there."""
    tests = "tests/multidevice/test_backend_c10d.py"
    done = srun("-m", "mpi4py", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--with-mpi", tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_rank_that_fails_ends_the_job() -> None:
    done = srun("-m", "mpi4py", str(FOLDER / "fails.py"))
    assert done.returncode not in (0, 124, 137)
    assert "rank 3 on the other host gives up" in done.stderr


def test_usage() -> None:
    done = run("slurm")
    assert done.returncode == 2
    assert "tests/namespaces/slurm COMMAND" in done.stderr
