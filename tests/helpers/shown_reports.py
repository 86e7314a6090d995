"""The reports that docs/bad_days.md shows, which the tests that make them compare with theirs.

A comment in front of a block says which test makes it.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bad_days.md"

#: What differs from run to run: numbers, the name of the program, and which of the ranks 0 and 2,
#: to which nothing happens, speaks.
VARYING = (
    (r"(?<!rank\\ )\d+(\\\.\d+)?", r"[\\d.]+"),
    (r"\w+\\\.py", r"\\w+\\.py"),
    (r"rank\\ [02]", r"rank [02]"),
)


def shown() -> dict[str, str]:
    """The blocks by what their comments say."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^<!-- (.*?) -->\n```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(dict(blocks))
    return dict(blocks)


def not_said(block: str, said: str) -> list[str]:
    """The lines of a block that were not said; three dots stand for anything."""
    return [line for line in block.splitlines() if not re.search(_pattern(line), said, re.M)]


def _pattern(line: str) -> str:
    pattern = re.escape(line.strip())
    for varies, anything in VARYING:
        pattern = re.sub(varies, anything, pattern)
    return "^ *" + pattern.replace(r"\.\.\.", ".*") + " *$"
