"""The last checkpoints beside each other: the right ones go, and nothing of the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import mdfuse as mf
from mdfuse import ProgramError
from mdfuse.compiled import newest


def whole(folder: Path, at: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_text("x")
    (folder / ".metadata").write_text("x")
    os.utime(folder / ".metadata", ns=(at, at))
    return folder


def test_the_last_ones_stay_by_when_they_were_saved(tmp_path: Path) -> None:
    """A run that went back saves smaller numbers later; others' folders and files are left."""
    for at, name in enumerate(("step-8", "step-9", "step-3")):
        whole(tmp_path / name, at)
    others = {"model-1", "step", "step-7.txt", "step-7", "step-best"}
    whole(tmp_path / "model-1"), whole(tmp_path / "step"), whole(tmp_path / "step-best")
    (tmp_path / "step-7.txt").write_text("")
    (tmp_path / "step-7").mkdir()  # a folder of the user's, without a box
    newest.point(whole(tmp_path / "step-4", 9), 2)
    assert {x.name for x in tmp_path.iterdir()} == others | {"step-3", "step-4", "newest"}
    assert newest.newest(tmp_path) == tmp_path / "step-4"
    newest.point(whole(tmp_path / "step-5", 10), 1)
    assert {x.name for x in tmp_path.iterdir()} == others | {"step-5", "newest"}


def test_what_a_death_left_goes(tmp_path: Path) -> None:
    """Boxes without an index; a checkpoint that never became the newest, once it is made again."""
    newest.point(whole(tmp_path / "step-1", 1), 3)
    (whole(tmp_path / "step-2") / ".metadata").unlink()
    left = whole(tmp_path / "step-3", 2)
    newest.make_room(left, 3)
    newest.make_room(tmp_path / "step-1", 3)
    assert not left.exists() and newest.newest(tmp_path) == tmp_path / "step-1"
    newest.point(whole(tmp_path / "step-3", 3), 2)
    assert {x.name for x in tmp_path.iterdir()} == {"step-1", "step-3", "newest"}


def test_there_is_none(tmp_path: Path) -> None:
    assert newest.newest(tmp_path / "gone") is None
    (tmp_path / "newest").symlink_to("step-1")
    assert newest.newest(tmp_path) is None
    (whole(tmp_path / "step-3", 5), whole(tmp_path / "step-2", 7))
    assert newest.newest(tmp_path) == tmp_path / "step-2"


@pytest.mark.parametrize(
    ("keep", "name", "portable"),
    [(0, "a-1", True), (True, "a-1", True), (1.5, "a-1", True), (2, "a", True), (2, "a-1", False)],
)
def test_wrong_requests(keep: object, name: str, portable: bool) -> None:
    with pytest.raises(ProgramError, match=f"save into {name} with keep={keep}"):
        newest.check("save", Path(name), keep, portable)
    assert newest.check("save", Path("a-1"), 3, True) == 3


def test_a_link_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "newest" / "in it").mkdir(parents=True)
    with pytest.raises(ProgramError, match="cannot be kept in order"):
        newest.point(whole(tmp_path / "step-1"), 1)
    assert (tmp_path / "step-1" / ".metadata").exists()


def test_a_folder_in_the_place_of_the_link_is_said_before_anything_is_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "newest").mkdir()
    step = mf.Step(counting(), {"n": torch.zeros(2)})
    with pytest.raises(ProgramError, match="it is no link, and would be replaced by one"):
        step.save(tmp_path / "step-1", portable=True, keep=2)
    assert [x.name for x in tmp_path.iterdir()] == ["newest"]


def counting() -> mf.Program:
    with mf.FusionDefinition("count") as fd:
        n = fd.define_tensor([2], name="n", mesh=mf.DeviceMesh.arange(dp=1))
        fd.add_output(n + 1, reuse=n)
    return mf.compile(fd)
