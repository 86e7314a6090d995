"""The page that says which files an addition touches names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mdfuse.errors import CommunicationError
from mdfuse.layouts.kinds import by_kind

ROOT = Path(__file__).resolve().parent.parent


def test_the_files_that_are_named_are_there() -> None:
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:mdfuse|tests|docs)/[\w/.]+|pyproject.toml)`", text)
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


#: How many files each addition touches at most, tests and documentation included.
MOST = {"A host instruction": 4, "A kind of communication": 6}


def test_an_addition_touches_few_files() -> None:
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    sections = {s.split("\n", 1)[0]: s for s in text.split("\n## ")[1:]}
    for name, most in MOST.items():
        listed = re.findall(r"^\d\. `([\w/.]+)`", sections[name], re.MULTILINE)
        assert len(set(listed)) == len(listed) == most, name


@pytest.mark.parametrize("rows", [{"Reduce": 1}, {"Reduce": 1, "Allreduce": 2, "Shout": 3}])
def test_a_table_by_kind_has_the_rows_that_there_are_kinds(rows: dict[str, int]) -> None:
    with pytest.raises(CommunicationError, match=r"no row of Allreduce|a row of Shout"):
        by_kind(rows, ("Reduce", "Allreduce"))
