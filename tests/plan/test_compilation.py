"""Compiled functions: once in a process, once on a host, in files for later processes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stand_in_compiler import UNITS, StandIn, arguments, expected, stack, until

import mdfuse as mf
from mdfuse import DeviceMesh, Options
from mdfuse.frontend.cache import FusionCache
from mdfuse.plan import artefacts, compilation, inductor
from mdfuse.plan.artefacts import Artefacts
from mdfuse.plan.fusing import Fuser

MESH = DeviceMesh.arange(t=1)
TESTS = Path(__file__).parent.parent

#: Holds a lock for as long as the process lives.
HOLD = """
from filelock import FileLock
lock = FileLock({!r})
lock.acquire()
print("held", flush=True)
input()
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    found = StandIn(tmp_path / "kept")
    found.install(monkeypatch)
    compilation._MADE.empty()
    yield found
    compilation._MADE.empty()


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs too, what cannot be compiled runs eagerly."""

    def fuser(must: bool, *rest: Any) -> Fuser:
        return Fuser(False, *rest)

    monkeypatch.setattr("mdfuse.evaluator.Fuser", fuser)


def start(compiler: StandIn, processes: int = 1) -> subprocess.Popen[str]:
    """Run `stack` in a process of its own."""
    command = [sys.executable, "-m", "helpers.stand_in_compiler"]
    command += [str(compiler.folder), str(processes)]
    return subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a process counted."""
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    counts: dict[str, Any] = json.loads(told)
    return counts


def run(timeout_s: float = 600.0) -> mf.Program:
    """Run `stack` in this process, which forgot what it compiled."""
    compilation._MADE.empty()
    FusionCache.reset()
    options = Options(compile="always", timeout_s=timeout_s)
    program = mf.compile(stack(), options=options)
    for _ in range(2):
        (got,) = program.run(*arguments())
        torch.testing.assert_close(got, expected(*arguments()[:2]))
    return program


def said(timeout_s: float = 600.0) -> str:
    """Run `stack`, and return what `explain` says."""
    return run(timeout_s).explain() + "\n"


def files(compiler: StandIn, kind: str) -> list[Path]:
    return sorted((compiler.folder / "mdfuse").glob(f"*.{kind}"))


def test_processes_share_the_work(compiler: StandIn) -> None:
    """Both have begun before one goes on; each compiles what the other has not begun."""
    both = [start(compiler, processes=2) for _ in range(2)]
    counts = [end(process) for process in both]
    assert len(compiler.began) == UNITS and len({*compiler.began}) == 2
    assert [x["compiled"] + x["in_files"] for x in counts] == [UNITS, UNITS]
    assert sum(x["compiled"] for x in counts) == UNITS
    last = end(start(compiler))
    assert (last["compiled"], last["in_files"]) == (0, UNITS)
    assert not last["unsaved"] and not last["unreadable"]


def test_what_is_in_files_is_not_compiled(compiler: StandIn) -> None:
    assert f"{UNITS} compiled\n" in said()
    assert f"{UNITS} found in files\n" in said()
    assert len(compiler.began) == UNITS


def _truncated(compiler: StandIn) -> None:
    path = files(compiler, "bin")[0]
    path.write_bytes(path.read_bytes()[:-1])


def _changed(compiler: StandIn) -> None:
    path = files(compiler, "bin")[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _half_described(compiler: StandIn) -> None:
    path = files(compiler, "json")[0]
    path.write_text(path.read_text()[:20])


def _described_as_something_else(compiler: StandIn) -> None:
    files(compiler, "json")[0].write_text("[]")


def _empty(compiler: StandIn) -> None:
    files(compiler, "json")[0].write_text("")


@pytest.mark.parametrize(
    "damage", [_truncated, _changed, _half_described, _described_as_something_else, _empty]
)
def test_damaged_files(compiler: StandIn, damage: Any) -> None:
    run()
    damage(compiler)
    told = said()
    assert f"1 compiled, {UNITS - 1} found in files\n" in told
    assert "1 compiled again, since their files are of no use: " in told
    assert f"{UNITS} found in files" in said()  # they are whole again


def test_an_interrupted_save(compiler: StandIn) -> None:
    """The description is written last: without it there is nothing."""
    run()
    files(compiler, "json")[0].unlink()
    told = said()
    assert f"1 compiled, {UNITS - 1} found in files" in told and "of no use" not in told


def test_what_the_compiler_does_not_take(
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()

    def load(path: Path) -> Any:
        raise AssertionError("another version\nand more")

    monkeypatch.setattr(inductor, "load", load)
    told = said()
    assert f"{UNITS} compiled\n" in told
    assert "AssertionError: another version" in told and "and more" not in told


def test_a_folder_that_cannot_be_made(compiler: StandIn, tmp_path: Path) -> None:
    compiler.folder = tmp_path / "file"
    compiler.folder.write_text("")
    compiler.compiled = lambda found: found.graph  # type: ignore[method-assign, assignment]
    inductor.compiled = compiler.compiled  # type: ignore[assignment]
    told = said()
    assert f"{UNITS} compiled\n" in told
    assert f"{UNITS} not saved for later runs: " in told and "Error" in told


def test_a_full_disk(compiler: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(function: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inductor, "save", save)
    told = said()
    assert f"{UNITS} not saved for later runs: OSError: [Errno 28] No space left" in told
    assert [x for x in (compiler.folder / "mdfuse").iterdir() if x.suffix != ".lock"] == []
    monkeypatch.undo()


def test_files_that_nobody_wants(compiler: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch's caches are off."""
    monkeypatch.setattr(inductor, "folder", lambda: None)
    for _ in range(2):
        assert f"{UNITS} compiled\n" in said()
    assert not (compiler.folder / "mdfuse").exists()


@pytest.fixture
def held(compiler: StandIn) -> Iterator[subprocess.Popen[str]]:
    """Another process, which compiles one of the functions and never ends."""
    run()
    described = files(compiler, "json")[0]
    described.unlink()
    lock = str(described.with_suffix(".lock"))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(lock)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_process_that_dies_while_it_compiles(
    compiler: StandIn, held: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system gives its lock to who waits."""
    waits = threading.Event()
    lock = Artefacts.lock

    def noted(self: Artefacts, name: str, timeout_s: float) -> Any:
        if timeout_s > 0:
            waits.set()
        return lock(self, name, timeout_s)

    def kill() -> None:
        assert waits.wait(60)
        held.send_signal(signal.SIGKILL)

    monkeypatch.setattr(Artefacts, "lock", noted)
    killer = threading.Thread(target=kill)
    killer.start()
    told = said()
    killer.join()
    assert f"1 compiled, {UNITS - 1} found in files\n" in told and "eagerly" not in told


@pytest.mark.usefixtures("held", "lenient")
def test_a_process_that_compiles_for_too_long() -> None:
    told = said(0.1)
    assert "eagerly, another process has compiled it for longer than timeout_s=0.1" in told
    assert f"{UNITS - 1} found in files" in told


@pytest.mark.usefixtures("held")
def test_a_process_that_compiles_for_too_long_is_an_error() -> None:
    with pytest.raises(mf.ProgramError, match="cannot be compiled: another process") as found:
        run(timeout_s=0.1)
    assert 'compile="auto" runs it eagerly' in str(found.value)


@pytest.mark.usefixtures("lenient")
def test_a_compiler_that_is_killed(compiler: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(found: inductor.TracedGraph) -> Any:
        raise RuntimeError("the compiler died with signal 9")

    monkeypatch.setattr(inductor, "compiled", killed)
    program = run()
    names = "fused0, fused1, fused2, fused3, fused4, fused5, fused6, fused7 and 4 more"
    why = "RuntimeError: the compiler died with signal 9"
    assert f"  {names}: run eagerly, {why}" in program.explain()
    assert files(compiler, "bin") == []


def test_threads_that_need_the_same(compiler: StandIn) -> None:
    found: list[Any] = []
    together = threading.Barrier(2)

    def work() -> None:
        forms = [((3,), (1,), torch.float32, torch.device("cpu"))]
        tally = compilation.Tally()
        key = ("the same",)
        together.wait(60)
        made = compilation.known(key, forms, tally)
        made = made or compilation.traced(key, forms, lambda x: [x + 1])
        late = compilation.complete([made, made], 60.0, False, tally)
        assert made.function is not None
        found.append((late, made.function(torch.ones(3))[0].tolist()))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [([], [2.0, 2.0, 2.0])] * 2
    until(lambda: len(compiler.began) == 1)


@pytest.mark.usefixtures("lenient")
def test_lengths_that_change_from_run_to_run(compiler: StandIn) -> None:
    with mf.FusionDefinition("lengths") as fd:
        x = fd.define_tensor([-1, 3], torch.float32, MESH, {})
        fd.add_output(x.exp() * 2.0)
    program = mf.compile(fd, options=Options(compile="always"))
    for length in (*range(2, 14), 3, 13):
        x = torch.randn(length, 3)
        (got,) = program.run(x)
        torch.testing.assert_close(got, x.exp() * 2)
    assert len(compiler.began) == 8
    assert "fused0: runs eagerly, it was compiled for 8 other shapes" in program.explain()


# -- whose folder it is ---------------------------------------------------------------------------


def test_the_folder_is_this_users_alone(compiler: StandIn) -> None:
    said()
    assert stat.S_IMODE((compiler.folder / "mdfuse").stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["group", "all", "link", "owner", "around"])
def test_a_folder_of_somebody_else_is_not_used(
    how: str,
    compiler: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing of it is read, which would run it, and nothing is written; that is told once."""
    said()  # files that would be found
    folder = compiler.folder / "mdfuse"
    before = sorted(path.name for path in folder.iterdir())
    assert f"{UNITS} found in files" in said()
    if how in ("group", "all"):
        folder.chmod(0o770 if how == "group" else 0o707)
    elif how == "around":
        compiler.folder.chmod(0o777)
    elif how == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    artefacts._refuse.cache_clear()
    for _ in range(2):
        told = said()
        assert f"{UNITS} compiled\n" in told
        assert f"{UNITS} not saved for later runs: PermissionError: " in told
    assert sorted(path.name for path in folder.iterdir()) == before
    (record,) = (r for r in caplog.records if r.name == "mdfuse.compile")
    assert record.getMessage().startswith("compiled functions are neither read nor kept: ")


def test_the_longest_function_is_begun_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that share the work would else wait for one that begins it last."""

    def sines(count: int) -> compilation.Made:
        def function(x: torch.Tensor) -> list[torch.Tensor]:
            for _ in range(count):
                x = x.sin()
            return [x]

        form = (3,), (1,), torch.float32, torch.device("cpu")
        return compilation.Made([form], traced=inductor.traced(function, [form]))

    functions, begun = [sines(n) for n in (2, 9, 1, 5)], list[compilation.Made]()
    monkeypatch.setattr(compilation, "_completed", lambda x, *_: begun.append(x) or True)
    assert compilation.complete(functions, 1.0, False, compilation.Tally()) == []
    assert begun == [functions[n] for n in (1, 3, 0, 2)]
