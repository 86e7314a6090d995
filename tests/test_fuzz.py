"""Hundreds of drawn inputs find nothing; `launch/fuzz` draws others.

A run has a part of them, --whole all; which part follows from the commit.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fuzz import options
from fuzz.driver import fuzz, once
from fuzz.fuzzers import FUZZERS
from fuzz.whole import KINDS
from helpers import sampling

import mdfuse as mf

#: Inputs of each fuzzer, where a thousand would take more than a quarter of a minute.
FEWER: dict[str, int] = {"command_line": 500, "definitions": 500, "notes": 200, "runs": 500}
#: Programs that are drawn beside options: more than a minute.
PROGRAMS = 240
SEED = 20_000


@pytest.mark.parametrize("name", sorted({*FUZZERS} - {"options"}))
def test_nothing_is_found(name: str) -> None:
    inputs = sampling.window(FEWER.get(name, 1_000), sampling.SHARES)
    print(f"{name}: {len(inputs)} inputs, seed {SEED + inputs.start}")
    found = fuzz(FUZZERS[name], len(inputs), SEED + inputs.start)
    assert not found, "\n\n".join(map(str, found))


def test_programs_run_with_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of the programs may be such as the default options refuse: they say nothing."""
    monkeypatch.setattr(options, "TALLY", Counter())
    programs = sampling.window(PROGRAMS, 5)
    found = fuzz(options.fuzz, len(programs), SEED + programs.start)
    told = "\n".join(options.told())
    print(told)
    assert not found, "\n\n".join(map(str, found))
    assert options.TALLY["pairs"] >= 0.8 * options.SETS * len(programs), told
    assert {*KINDS} <= {*options.TALLY}, told


def test_a_program_and_options_are_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of both is what the fault needs."""

    def check(case: options.Case, said: dict[str, Any], _: random.Random) -> None:
        assert "bucket_bytes" not in said or not case.host.communications

    monkeypatch.setattr(options, "check_pair", check)
    findings = filter(None, (once(options.fuzz, n) for n in range(SEED, SEED + 6)))
    texts = [f.text for f in itertools.islice(findings, sampling.of(6, 2))]
    assert texts
    for text in texts:
        assert re.search(r"^options {'bucket_bytes': \d+}$", text, re.M), text
        assert "without ['" in text, text


def test_the_driver_finds_what_is_wrong() -> None:
    def draw(drawn: random.Random) -> None:
        number = drawn.randrange(4)
        if number == 0:
            raise mf.MdfuseError("an error of ours")
        if number == 1:
            raise KeyError("not ours")
        if number == 2:
            raise mf.MdfuseError("")

    places = {finding.place.split()[0] for finding in fuzz(draw, 50, 0)}
    assert places == {"KeyError", "MdfuseError"}
    again = [once(draw, finding.seed) for finding in fuzz(draw, 50, 0)]
    assert [f.place for f in again if f] == [f.place for f in fuzz(draw, 50, 0)]


def test_programs_with_launches() -> None:
    """In a process of its own, where no other test has prepared the same programs."""
    tests = Path(__file__).parent
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "runs", "--inputs", "12", "--seed", "1", "--launches"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "runs: 12 inputs, seed 1, 0 findings"
    launches, functions = (int(x) for x in re.findall(r"\d+", said[1]))
    assert launches >= functions > 0
