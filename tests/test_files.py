"""Files that are whole or not there, and folders of this user's alone."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import torch
from helpers.full_disk import failing

from mdfuse import ProgramError, files


def test_a_file_is_made_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where" / "x.pt"
    with files.new_file(path) as file:
        file.write(b"before")
        at = file.tell()
        torch.save(torch.arange(3), file)
    assert at == 6 and path.read_bytes().startswith(b"before")
    files.put(path, tmp_path / "y.pt")
    assert not path.exists() and (tmp_path / "y.pt").stat().st_size > 6
    files.remove(tmp_path / "y.pt", tmp_path / "gone")
    assert [*tmp_path.iterdir()] == [tmp_path / "some"]


@pytest.mark.parametrize("moment", ["write", "fsync", "open", "folder"])
def test_what_the_system_says_is_told_with_the_path(moment: str, tmp_path: Path) -> None:
    """Also where torch's own writer raises something else; nothing is left."""
    path = tmp_path / "folder" / "x.pt"
    text = re.escape(f"{path} cannot be written")

    def write() -> None:
        with files.new_file(path) as file:
            torch.save(torch.zeros(10_000), file)

    with failing(moment), pytest.raises(ProgramError, match=text) as error:
        write()
    assert (error.value.because or "").startswith("[Errno ")
    assert "test_files.py" in error.value.where[0]
    assert not path.exists()


def test_other_errors_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), files.new_file(tmp_path / "a") as file:
        file.write(b"x" * (1 // 0))
    with pytest.raises(RuntimeError, match="of something else"), files.new_file(tmp_path / "a"):
        raise RuntimeError("of something else")
    assert not [*tmp_path.iterdir()]


def test_a_name_that_cannot_be_given(tmp_path: Path) -> None:
    (tmp_path / "folder" / "in it").mkdir(parents=True)
    (tmp_path / "a").write_text("")
    with pytest.raises(ProgramError, match="folder cannot be written"):
        files.put(tmp_path / "a", tmp_path / "folder")


# -- folders -------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_folder(tmp_path: Path) -> None:
    folder = tmp_path / "around" / "mdfuse"
    before = os.umask(0o002)  # as some systems have it
    try:
        files.private_folder(folder)
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    folder.chmod(0o755)  # as it was made before
    files.check_private(folder)
    files.private_folder(folder)
    assert mode(folder) == 0o700


def test_folders_that_others_may_write_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "around" / "mdfuse"
    files.private_folder(folder)

    def refused(text: str) -> None:
        for act in (files.check_private, files.private_folder):
            with pytest.raises(PermissionError, match=text):
                act(folder)

    for more in (0o020, 0o002):
        folder.chmod(0o700 | more)
        refused("others may write into .*mdfuse")
        folder.chmod(0o700)
    folder.parent.chmod(0o777)
    refused("everybody may write into .*around")
    folder.parent.chmod(0o1777)  # as /tmp
    files.check_private(folder)
    folder.parent.chmod(0o775)
    files.check_private(folder)
    me = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: me + 1)
        refused(rf"around is user {me}'s|mdfuse is user {me}'s")
    folder.rename(folder.parent / "other")
    folder.symlink_to(folder.parent / "other")
    refused("is a link or a file")
    folder.unlink()
    folder.write_text("")
    refused("is a link or a file")
    folder.unlink()
    with pytest.raises(FileNotFoundError):
        files.check_private(folder)


@pytest.mark.parametrize("whose", ["mdfuse", "around", "link"])
def test_folders_of_somebody_else(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.private_folder(tmp_path / "around" / "mdfuse")
    (tmp_path / "link").symlink_to(tmp_path / "around")
    folder = tmp_path / ("around" if whose == "mdfuse" else whose) / "mdfuse"
    files.check_private(folder)
    lstat = Path.lstat

    def given_away(self: Path) -> os.stat_result:
        found = lstat(self)
        is_it = self.name == whose
        return os.stat_result([*found[:4], 12345, *found[5:]]) if is_it else found

    monkeypatch.setattr(Path, "lstat", given_away)
    for act in (files.check_private, files.private_folder):
        with pytest.raises(PermissionError, match=rf"{whose} is user \d+'s, and this is user"):
            act(folder)


@pytest.mark.parametrize("place", [5, None, b"x", "a\0b", [], {"a": 1}])
def test_what_is_no_path(place: object) -> None:
    with pytest.raises(ProgramError, match="the path"):
        files.as_path(place)
    assert files.as_path("a/b") == files.as_path(Path("a/b")) == Path("a/b")
