"""Saves in a thread: steps go on, errors come in one call, and a death leaves the newest whole."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.full_disk import failing

import mdfuse as mf
from mdfuse import ProgramError, files
from mdfuse.compiled import background, newest
from mdfuse.frontend.importing import save as saving

ROWS = 1000


def counter(rows: int = ROWS) -> mf.Step:
    """A step that counts: its state has one number alone at any time."""
    with mf.FusionDefinition("count") as fd:
        n = fd.define_tensor([rows], mesh=mf.DeviceMesh.arange(dp=1), name="n")
        fd.add_output(n.sum())
        fd.add_output(n + 1, reuse=n)
    return mf.Step(mf.compile(fd), {"n": torch.zeros(rows)})


def number(step: mf.Step) -> int:
    """The one number of the state."""
    n = step.state["n"]
    assert n is not None and (n == n[0]).all()
    return int(n[0])


class Slow:
    """A disk that writes nothing until it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, write = threading.Event(), saving.write_parts

        def slow(*arguments: Any) -> None:
            assert self.go.wait(20)
            write(*arguments)

        monkeypatch.setattr(saving, "write_parts", slow)


def test_steps_go_on_while_a_disk_is_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is saved is the state as it was; the next save waits."""
    step, disk = counter(), Slow(monkeypatch)
    step()
    folder = step.save(tmp_path / "step-1", portable=True, wait=False, keep=2)
    for _ in range(5):
        step()
    assert newest.newest(tmp_path) is None and not (folder / ".metadata").exists()
    threading.Timer(0.2, disk.go.set).start()
    step.save(tmp_path / "step-6", portable=True, wait=False, keep=2)
    assert newest.newest(tmp_path) == folder
    step.saved()
    again = counter()
    for name, wanted in (("step-1", 1), ("step-6", 6), ("newest", 6)):
        again.load(tmp_path / name)
        assert number(again) == wanted


@pytest.mark.parametrize("portable", [True, False])
def test_a_save_of_each_kind_is_what_one_that_waits_is(portable: bool, tmp_path: Path) -> None:
    step, again = counter(), counter()
    step()
    wanted = step.save(tmp_path / "a", portable=portable)
    path = step.save(tmp_path / "b", portable=portable, wait=False)
    step()
    step.saved()
    assert path.relative_to(tmp_path / "b") == wanted.relative_to(tmp_path / "a")
    for folder in ("a", "b"):
        again.load(tmp_path / folder)
        assert number(again) == 1


@pytest.mark.parametrize("call", ["step", "save", "load", "saved"])
def test_an_error_is_that_of_the_next_call(call: str, tmp_path: Path) -> None:
    """With the line of the save; once, and then all goes on."""
    step = counter()
    calls: dict[str, Callable[[], Any]] = {
        "step": step,
        "save": lambda: step.save(tmp_path / "other", portable=True),
        "load": lambda: step.load(tmp_path / "old"),
        "saved": step.saved,
    }
    step.save(tmp_path / "old", portable=True)
    with failing("write"):
        step.save(tmp_path / "new", portable=True, wait=False)  # the line
        time.sleep(0.2)
        with pytest.raises(ProgramError, match=r"new/__0_0.distcp cannot be written") as error:
            calls[call]()
    assert "# the line" in error.value.where[0]
    assert number(step) == 0 and not [*(tmp_path / "new").iterdir()]
    calls[call]()
    step.save(tmp_path / "new", portable=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_that_stays_is_of_its_own_version(wait: bool, tmp_path: Path) -> None:
    """A save that is refused since the folder has one changes nothing that a recovery knows."""
    step = counter()
    step()
    step.save(tmp_path / "step-1", portable=True, keep=1)
    step()

    def save() -> None:
        step.save(tmp_path / "step-1", portable=True, keep=1, wait=wait)
        step.saved()

    with pytest.raises(ProgramError, match="has a checkpoint"):
        save()
    step._versions.is_whole = False
    again = mf.recover(step, step.program, or_from=tmp_path / "step-1")
    assert (number(again), again.version) == (1, 1)


@pytest.mark.parametrize("nap", [0.0, 0.3], ids=["before", "after"])
def test_an_error_at_the_end_is_logged(
    nap: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody calls the step any more; `Communicator.close` waits, or comes after the error."""
    step = counter()
    with failing("open"):
        step.save(tmp_path / "new", portable=True, wait=False)
        time.sleep(nap)
        for act in [*mf.init().at_end.values()]:
            act()
    assert "could not save the state of @count" in caplog.text
    assert not any(name.startswith("save") for name in mf.init().at_end)


def test_copies_use_their_memory_again() -> None:
    copies = background.Copies()
    x, y = torch.arange(6.0).reshape(2, 3).T, torch.ones(4, dtype=torch.bfloat16)
    before = copies.of([x, None, y])()
    assert before[1] is None and before[0] is not None and torch.equal(before[0], x)
    places = [z.data_ptr() for z in before if z is not None]
    after = copies.of([x + 1, None, y])()
    assert [z.data_ptr() for z in after if z is not None] == places
    assert after[0] is not None and torch.equal(after[0], x + 1)
    other = copies.of([x[:2]])()
    assert other[0] is not None and torch.equal(other[0], x[:2])


# -- a death in any moment -----------------------------------------------------------------------

#: Calls of the system that change files: a process is killed before the n-th of them.
ACTS: list[tuple[Any, str]] = [
    (os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "open"), (Path, "replace"),
    (Path, "symlink_to"), (Path, "unlink"), (Path, "mkdir"), (files.NewFile, "write"),
]  # fmt: skip
SAVES = 3
#: More than these saves need.
ENOUGH = 240


def killed_before(which: int, folder: Path) -> None:
    """Count and save, all that newly forked, and die before an act on files, or at the end."""
    acts = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any, **named: Any) -> Any:
            nonlocal acts
            acts += 1
            if acts > which:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*arguments, **named)

        return acting

    for owner, name in ACTS:
        setattr(owner, name, counted(getattr(owner, name)))
    step = counter()
    for n in range(1, SAVES + 1):
        step()
        step.save(folder / f"step-{n}", portable=True, wait=False, keep=2)
    step.saved()


def after_death(which: int, folder: Path) -> int:
    """Die in a fork; return the signal that it died of, 0 for none."""
    child = os.fork()
    if not child:
        try:
            killed_before(which, folder)
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_a_death_at_any_moment_leaves_a_whole_newest(tmp_path: Path) -> None:
    """It is loaded, and a run goes on from it in the same folder, whatever was left half done."""
    torch.set_num_threads(1)  # forks have no other thread
    mf.init()
    some = range(sampling.window(12, 12).start, ENOUGH, sampling.of(1, 12))
    last, step = 0, counter()
    for which in [*some, ENOUGH]:
        folder = tmp_path / str(which)
        died = after_death(which, folder)
        there = newest.newest(folder)
        reached = 0
        if there is not None:
            step.load(folder / newest.NAME)
            reached = number(step)
            assert there.name == f"step-{reached}"
        assert reached >= last, "a later death leaves no older one"
        last = reached
        assert died or reached == SAVES
        step.load(folder / newest.NAME) if reached else step.state.update(n=torch.zeros(ROWS))
        for n in range(reached + 1, reached + 3):
            step()
            step.save(folder / f"step-{n}", portable=True, wait=False, keep=2)
        step.saved()
        step.load(folder / "newest")
        assert number(step) == reached + 2
        whole = {x.parent.name for x in folder.glob("*/.metadata")} - {"newest"}
        assert whole == {f"step-{reached + 1}", f"step-{reached + 2}"}
        assert {x.name for x in folder.iterdir()} == whole | {"newest"}
    assert last == SAVES
