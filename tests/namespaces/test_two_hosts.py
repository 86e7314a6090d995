"""Programs on two hosts that know each other by address alone, under torchrun and mpirun."""

from __future__ import annotations

import subprocess

import pytest
from on_hosts import FOLDER, run

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

LAUNCHERS = ["torchrun", "mpirun"]


def two_hosts(launcher: str, *program: str) -> subprocess.CompletedProcess[str]:
    """Two ranks on each host."""
    return run("two_hosts", launcher, *program)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_demo(launcher: str) -> None:
    """The demo compares itself with one device, and its exit status tells."""
    done = two_hosts(launcher, "examples/minilm.py")
    assert done.returncode == 0, done.stderr
    assert f"4, started by {launcher} (" in done.stdout
    assert "within 1e-05" in done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_doctor_sees_the_hosts(launcher: str) -> None:
    done = two_hosts(launcher, "-m", "mdfuse", "doctor", "--collective")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["host", "name", "host0", "is", "10.213.0.1"] in lines
    assert ["interfaces", "lo,", "eth0"] in lines
    assert f"{launcher}: rank 0 of 4, local rank 0" in done.stdout
    assert done.stdout.rstrip().endswith("no problem found")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_fails_ends_the_job(launcher: str) -> None:
    done = two_hosts(launcher, str(FOLDER / "fails.py"))
    assert done.returncode not in (0, 124, 137)
    assert "rank 3 on the other host gives up" in done.stderr


def test_nothing_is_left() -> None:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not [line for line in done.stdout.splitlines() if line.startswith("mdfuse-")]


def test_usage() -> None:
    done = two_hosts("telegraph", "x.py")
    assert done.returncode == 2
    assert "tests/namespaces/two_hosts torchrun|mpirun script.py" in done.stderr
