"""How much of a sweep runs whose cases repeat each other: a sample of them, with --whole all.

`times.json` says how long a case of each swept test takes, as it was once measured. A swept test
runs as many of its cases as take `BUDGET` seconds by that file, drawn by a seed that is printed:
`--draw SEED` draws the same ones again. No clock is asked, so a run on a slow machine has as many
cases as one on a quick machine.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Seconds that the cases of one swept test take, about.
BUDGET = 4.0

#: Tests of which every case runs: each is another input format, or they are counted together.
EVERY = ("tests/test_fuzz.py", "tests/hir/verify/test_check_mutants.py")

_TIMES = Path(__file__).with_name("times.json")

_is_whole = False


def take_all(is_whole: bool) -> None:
    """Say, before tests are collected, whether sweeps are run as a whole."""
    global _is_whole
    _is_whole = is_whole


def is_whole() -> bool:
    return _is_whole


def of(whole: int, sample: int) -> int:
    """How many cases are run: all, or a sample."""
    return whole if _is_whole else sample


def times() -> dict[str, float]:
    """Swept test -> seconds of one of its cases."""
    found: dict[str, float] = json.loads(_TIMES.read_text(encoding="utf-8"))
    return found


def seed_of_commit() -> int:
    """The seed of a run that names none: another one for each commit; 0 outside of a clone."""
    shown = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(shown.stdout, 16) if shown.returncode == 0 else 0


def left_out(cases: Sequence[str], seconds: Mapping[str, float], seed: int) -> set[str]:
    """The cases that a run leaves out.

    Args:
        cases: the ids of tests: `tests/test_a.py::test_b[case]`.
        seconds: swept test, without the brackets -> seconds of a case.
        seed: draws them.

    >>> cases = [f"test_a.py::test_b[{n}]" for n in range(10)] + ["test_a.py::test_c"]
    >>> gone = left_out(cases, {"test_a.py::test_b": 2.0}, 7)
    >>> len(gone), gone == left_out(cases, {"test_a.py::test_b": 2.0}, 7)
    (8, True)
    """
    swept: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        test = case.partition("[")[0]
        if test in seconds and not test.startswith(EVERY):
            swept[test].append(case)
    gone: set[str] = set()
    for test, every in swept.items():
        count = min(len(every), math.ceil(BUDGET / seconds[test]))
        gone.update({*every}.difference(random.Random(f"{seed} {test}").sample(every, count)))
    return gone
