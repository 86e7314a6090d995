"""The page that says which files an addition touches names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_files_that_are_named_are_there() -> None:
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:mdfuse|tests|docs)/[\w/.]+|pyproject.toml)`", text)
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]
