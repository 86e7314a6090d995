"""The command line of the fuzzers: `python -m fuzz NAME [--inputs N] [--seed S]`, from `tests/`."""

from __future__ import annotations

import argparse
import random
import sys

from rich.console import Console
from rich.progress import track

from fuzz.driver import Finding, fuzz
from fuzz.fuzzers import FUZZERS

#: Inputs between two steps of the progress bar.
BATCH = 100


def main() -> int:
    """Fuzz, print each finding once it is made; 1 where there are any."""
    parser = argparse.ArgumentParser(prog="launch/fuzz", description=__doc__)
    parser.add_argument("name", choices=[*FUZZERS, "all"])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first input; drawn by default"
    )
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if asked.seed is None else asked.seed
    console = Console(stderr=True)
    status = 0
    for name in FUZZERS if asked.name == "all" else [asked.name]:
        found: dict[str, Finding] = {}
        starts = range(seed, seed + asked.inputs, BATCH)
        for start in track(starts, description=name, console=console, transient=True):
            count = min(BATCH, seed + asked.inputs - start)
            for finding in fuzz(FUZZERS[name], count, start):
                if finding.place not in found:
                    found[finding.place] = finding
                    print(f"{finding}\n", flush=True)
        print(f"{name}: {asked.inputs} inputs, seed {seed}, {len(found)} findings", flush=True)
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
