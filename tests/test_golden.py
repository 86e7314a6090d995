"""Files that tests read: a text that differs or has no file, and a file that no test reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import golden, programs


def test_a_file_has_the_text_that_was_accepted(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "program.txt"
    with pytest.raises(AssertionError, match="missing"):
        golden.same("a\nb", file, is_accepted=False)
    golden.same("a\nb", file, is_accepted=True)
    golden.same("a\nb", file, is_accepted=False)
    with pytest.raises(AssertionError, match="--accept"):
        golden.same("a\nb\n", file, is_accepted=False)


def test_a_file_that_no_test_reads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    file = golden.folder(Path(__file__)) / "renamed.txt"
    file.parent.mkdir()
    file.touch()
    assert golden.unread([request.node]) == [file]
    monkeypatch.setattr(golden, "path", lambda test: file)
    monkeypatch.setattr(request.node, "fixturenames", ["golden"])
    assert golden.unread([request.node]) == []


def test_each_folder_is_of_a_module() -> None:
    """The folder of a module that is gone would go unnoticed."""
    folders = {file.parent for file in golden.FOLDER.rglob("*.txt")}
    modules = [golden.TESTS / x.relative_to(golden.FOLDER).with_suffix(".py") for x in folders]
    assert modules and all(x.is_file() for x in modules)


def test_each_program_is_read() -> None:
    """A text that no test names, by itself or by its folder, would go unnoticed."""
    sources = "".join(x.read_text(encoding="utf-8") for x in golden.TESTS.rglob("*.py"))
    for file in programs.FOLDER.rglob("*.hir"):
        folder, name = file.parent.name, file.stem
        of_functions = f'(f"{folder}/{{name}}")' in sources and f"\ndef {name}(" in sources
        whole = f'program_texts("{folder}")' in sources
        assert of_functions or whole or f'"{folder}/{name}"' in sources, file
