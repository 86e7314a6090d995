"""Golden files: long texts that tests expect, `tests/golden/MODULE/TEST.txt` or `.../CASE.txt`.

    def test_the_program(golden: Golden) -> None:
        golden(str(program))

`pytest --accept` writes what differs, and removes files that no test reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

Golden = Callable[[str], None]

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "golden"


def folder(module: Path) -> Path:
    return FOLDER / module.relative_to(TESTS).with_suffix("")


def path(test: pytest.Item) -> Path:
    """The file of a test: it has the name of the case, where the test has cases."""
    assert isinstance(test, pytest.Function)
    is_case = test.get_closest_marker("parametrize")
    name = test.callspec.id if is_case else test.originalname.removeprefix("test_")
    return folder(test.path) / f"{name}.txt"


def unread(tests: Iterable[pytest.Item]) -> list[Path]:
    """Files in the folders of the tests' modules that none of the tests reads."""
    tests = [*tests]
    read = {path(x) for x in tests if "golden" in getattr(x, "fixturenames", ())}
    modules = {x.path for x in tests}
    return sorted({file for x in modules for file in folder(x).glob("*")} - read)


def same(text: str, file: Path, is_accepted: bool) -> None:
    """Fail unless the file has the text; write it where a change is accepted."""
    if is_accepted:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
    assert file.is_file(), f"{file} is missing: pytest --accept writes it"
    assert text == file.read_text(encoding="utf-8").removesuffix("\n"), f"{file}: --accept"
