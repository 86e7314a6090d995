"""The command line of the fuzzers: `python -m fuzz NAME [--inputs N] [--seed S]`, from `tests/`.

With `--launches` all programs have launches: bodies are traced as for the compiler, and run so.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import nullcontext

from helpers import compiled_suite
from rich.console import Console
from rich.progress import track

from fuzz.driver import Finding, fuzz
from fuzz.fuzzers import FUZZERS, TOLD

#: Inputs between two steps of the progress bar.
BATCH = 100


def main() -> int:
    """Fuzz as the command line says; 1 where there are findings."""
    parser = argparse.ArgumentParser(prog="launch/fuzz", description=__doc__)
    parser.add_argument("name", choices=[*FUZZERS, "all"])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first input; drawn by default"
    )
    parser.add_argument("--launches", action="store_true", help='programs with compile="always"')
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if asked.seed is None else asked.seed
    names = [*FUZZERS] if asked.name == "all" else [asked.name]
    with compiled_suite.launches() if asked.launches else nullcontext():
        found = sum([_findings(name, asked.inputs, seed) for name in names])
    for line in compiled_suite.told() if asked.launches else ():
        print(line)
    return int(found > 0)


def _findings(name: str, inputs: int, seed: int) -> int:
    """Give one fuzzer its inputs, print each finding once it is made; return how many there are."""
    console = Console(stderr=True)
    found: dict[str, Finding] = {}
    for start in track(
        range(seed, seed + inputs, BATCH), description=name, console=console, transient=True
    ):
        count = min(BATCH, seed + inputs - start)
        for finding in fuzz(FUZZERS[name], count, start):
            if finding.place not in found:
                found[finding.place] = finding
                print(f"{finding}\n", flush=True)
    print(f"{name}: {inputs} inputs, seed {seed}, {len(found)} findings", flush=True)
    for line in TOLD[name]() if name in TOLD else ():
        print(f"{name}: {line}", flush=True)
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
