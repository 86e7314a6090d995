"""`mdfuse launch`: who died is said, survivors are left alone, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mdfuse.cli import launching
from mdfuse.cli.main import app

#: A rank without torch: what it does is the rest of the line.
PROGRAM = """
import os, signal, subprocess, sys, time
rank, again = int(os.environ["RANK"]), int(os.environ.get("MDFUSE_RESPAWNED", 0))
def note(text):
    with open(f"{rank}.{again}.new", "w") as file:
        file.write(str(text))
    os.rename(f"{rank}.{again}.new", f"{rank}.{again}")
def until(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def die(number=9):
    os.kill(os.getpid(), number)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "program.py"


def launched(program: Path, lines: str, *options: str, count: int = 3) -> Result:
    program.write_text(PROGRAM + lines)
    given = ["launch", "-n", str(count), *options, str(program), "-n", "x", "--respawn"]
    return CliRunner().invoke(app, given)


def test_ranks_know_who_they_are(program: Path) -> None:
    lines = (
        "note([os.environ[n] for n in ('LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')]+sys.argv[1:])"
    )
    result = launched(program, lines)
    assert (result.exit_code, result.output) == (0, "")
    for rank in range(3):
        said = (program.parent / f"{rank}.0").read_text()
        assert said == str([str(rank), "3", "127.0.0.1", "-n", "x", "--respawn"])


@pytest.mark.parametrize(
    ("act", "status", "said"),
    [
        ("die()", 137, "died of SIGKILL, signal 9"),
        ("die(signal.SIGSEGV)", 139, "died of SIGSEGV, signal 11"),
        ("die(35)", 163, "died of "),
        ("sys.exit(3)", 3, "ended with status 3 after"),
        ("os._exit(70)", 70, "ended with status 70 (its watchdog ended it)"),
        ("os._exit(71)", 71, "ended with status 71 (the others went on without it)"),
    ],
)
def test_who_died_and_of_which_signal(program: Path, act: str, status: int, said: str) -> None:
    """The others go on to their end; without word that they went on together it is a failure."""
    lines = f"if rank == 1:\n    note(0); {act}\nuntil('1.0'); time.sleep(0.2); note('lived')"
    result = launched(program, lines)
    assert result.exit_code == status
    assert result.output.startswith("mdfuse launch: rank 1 (process ")
    assert said in result.output and "; 2 ranks left" in result.output
    assert all((program.parent / f"{rank}.0").read_text() == "lived" for rank in (0, 2))


def test_a_loss_that_others_outlive_is_no_failure(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_went_on", lambda _: True)
    assert launched(program, "if rank == 1: die()").exit_code == 0
    assert launched(program, "die(); sys.exit(2)").exit_code == 137
    assert launched(program, "die() if rank else sys.exit(2)").exit_code in (2, 137)
    assert launched(program, "if rank == 1: sys.exit(2)").exit_code == 2


def test_a_new_process_in_a_lost_ranks_place(program: Path) -> None:
    lines = "note(again)\nif rank == 1 and again < 2: die()\nuntil('1.2')"
    result = launched(program, lines, "--respawn")
    assert result.exit_code == 0, result.output
    assert "rank 1: process 2 in its place" in result.output
    assert (program.parent / "1.2").read_text() == "2"


def test_not_more_than_some(program: Path) -> None:
    """A rank that always dies ends; so does one that ends by an error of its own."""
    lines = f"note(0)\nif rank == 1: die()\nif rank == 2: sys.exit(4)\nuntil('1.{launching.MOST}')"
    result = launched(program, lines, "--respawn")
    assert result.exit_code in (4, 137)
    assert result.output.count("in its place") == launching.MOST


def test_new_processes_that_come_too_late_end(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "GRACE_S", 0.3)
    monkeypatch.setattr(launching, "_went_on", lambda _: True)
    lines = "if rank == 1 and not again: die()\nnote(0)\nuntil('1.1')\nwhile again: time.sleep(1)"
    result = launched(program, lines, "--respawn")
    assert result.exit_code == 0
    assert result.output.splitlines()[-1].endswith("processes that did not join end")


@pytest.mark.parametrize("given", [[], ["--", "-m"], ["--odd"], ["nobody-has-this"]])
def test_what_is_no_program(given: list[str]) -> None:
    result = CliRunner().invoke(app, ["launch", "-n", "2", *given])
    assert result.exit_code == 1 and "-m MODULE, or an executable" in result.output


# -- ends from outside ---------------------------------------------------------------------------

#: Each rank ignores SIGTERM or not, and has a child of its own.
STUBBORN = """
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
note(f"{os.getpid()} {child.pid}")
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(") ")[2][0] not in "ZX"


def all_processes(folder: Path, count: int) -> list[int]:
    """The ranks and their children, once all are there."""
    files = [folder / f"{rank}.0" for rank in range(count)]
    until = time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int(pid) for file in files for pid in file.read_text().split()]


def wait_for_ends(pids: list[int]) -> None:
    """Wait until none is alive: the kernel ends a process a moment after the signal was sent."""
    until = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["willing", "stubborn"])
def test_a_signal_ends_all(
    program: Path, monkeypatch: pytest.MonkeyPatch, number: int, how: str
) -> None:
    monkeypatch.setattr(launching, "GRACE_S", 0.5)
    program.write_text(PROGRAM + STUBBORN)

    def ask() -> None:
        all_processes(program.parent, 2)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    result = CliRunner().invoke(app, ["launch", "-n", "2", str(program), how])
    asking.join()
    assert result.exit_code == 128 + number
    assert f"{signal.Signals(number).name}: all ranks end" in result.output
    wait_for_ends(all_processes(program.parent, 2))


def test_ranks_die_with_a_launcher_that_is_killed(program: Path) -> None:
    """Their own children are theirs to end."""
    program.write_text(PROGRAM + "note(os.getpid()); time.sleep(60)")
    command = [sys.executable, "-m", "mdfuse", "launch", "-n", "2", str(program)]
    with subprocess.Popen(command) as launcher:
        ranks = all_processes(program.parent, 2)
        assert all(is_alive(pid) for pid in ranks)
        launcher.kill()
    wait_for_ends(ranks)
