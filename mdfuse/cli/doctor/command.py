"""The command `mdfuse doctor`: look, print, and set the exit status."""

from __future__ import annotations

from mdfuse.cli import screen
from mdfuse.cli.doctor.examination import examine, of_other_ranks
from mdfuse.cli.doctor.ranks import check_ranks


def run(is_collective: bool) -> None:
    """Print what this machine has; the exit status tells whether programs can run.

    Args:
        is_collective: also let all ranks communicate.

    Raises:
        SystemExit: status 1 where something keeps programs from running.
    """
    console = screen.output()
    problems = examine(console) if screen.is_first() else of_other_ranks()
    if is_collective:
        problems = check_ranks(console, problems)
    if problems:
        lines = "\n".join(["problems:", *(f"  {line}" for line in problems)])
        screen.fail(lines, everywhere=not is_collective)
    console.print("no problem found")
