"""No program of the tests receives more than it did."""

from __future__ import annotations

import json

import pytest
from helpers.program_bytes import GOLDEN, TABLES


@pytest.mark.parametrize("subject", TABLES)
def test_no_program_receives_more(subject: str) -> None:
    """New programs are fine; `program_bytes.py` says what to do where one changed."""
    golden: dict[str, list[int]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = {name: row for name, row in TABLES[subject]() if name in golden}
    assert found
    for name, row in found.items():
        pairs = list(zip(golden[name], row, strict=True))
        more = {i: pair for i, pair in enumerate(pairs) if pair[1] > pair[0]}
        assert not more, f"{name}: number -> (before, now) {more}"
