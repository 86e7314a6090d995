"""Samples of swept tests: which cases run, and that the times they are chosen by are of tests."""

from __future__ import annotations

import re
from pathlib import Path

from helpers import sampling

ROOT = Path(__file__).resolve().parent.parent

CASES = [f"tests/test_a.py::test_b[{n}]" for n in range(40)]


def test_as_many_run_as_take_the_budget() -> None:
    seconds = {"tests/test_a.py::test_b": sampling.BUDGET / 5}
    gone = sampling.left_out([*CASES, "tests/test_a.py::test_c"], seconds, 3)
    assert len(gone) == 35 and gone <= {*CASES}
    assert sampling.left_out(CASES, seconds, 3) == gone != sampling.left_out(CASES, seconds, 4)


def test_one_case_runs_whatever_it_takes() -> None:
    assert len(sampling.left_out(CASES, {"tests/test_a.py::test_b": 1e3}, 0)) == 39


def test_other_tests_run_as_a_whole() -> None:
    every = [f"{sampling.EVERY[0]}::test_b[{n}]" for n in range(40)]
    seconds = {f"{sampling.EVERY[0]}::test_b": 1e3, "tests/test_a.py::test_c": 1e3}
    assert sampling.left_out([*every, *CASES], seconds, 0) == set()


def test_every_seed_takes_other_cases() -> None:
    """Commits in a row run all cases."""
    seconds = {"tests/test_a.py::test_b": sampling.BUDGET / 5}
    ran = {x for seed in range(200) for x in {*CASES} - sampling.left_out(CASES, seconds, seed)}
    assert ran == {*CASES}


def test_times_are_of_tests() -> None:
    """A test that was renamed would run as a whole unnoticed."""
    suite = ROOT / "tests" / "multidevice" / "backend_suite.py"
    for name in sampling.times():
        path, _, test = name.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        if f"from {suite.stem} import *" in text:
            text += suite.read_text(encoding="utf-8")
        # It is defined there, or imported.
        assert re.search(rf"\b{test.rpartition('::')[2]}\b", text), name


def test_files_that_share_seconds_have_swept_tests() -> None:
    assert {*sampling.TOGETHER} <= {name.partition("::")[0] for name in sampling.times()}
