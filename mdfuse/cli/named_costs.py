"""Tables of costs by name: `--costs h100`."""

from __future__ import annotations

from mdfuse.cli import screen
from mdfuse.config import backend_choice, options_from_environment
from mdfuse.errors import ProgramError
from mdfuse.seeing.costs import Costs
from mdfuse.seeing.named_tables import HERE, named, table_here


def costs_named(text: str | None) -> Costs | None:
    """Return a table of costs by its name, that of this machine, or that of a JSON file.

    Raises:
        ProgramError: there is no such table, or the file does not hold one.
    """
    if text is None:
        return None
    usual = backend_choice(options_from_environment().backend).usual
    return _costs_here(usual) if text == HERE else named(text, usual)[0]


def _costs_here(backend: str) -> Costs:
    """Return the table of this machine, and print its name and the reasons for it."""
    table, lines = table_here(backend)
    console = screen.output()
    if table is None:
        *lines, because = lines
    for line in lines:
        console.print(line, soft_wrap=True)
    if table is None:
        raise ProgramError(
            "there is no table of costs of this machine",
            because=because,
            hint="torchrun --nproc-per-node 2 -m mdfuse calibrate",
        )
    console.print(f"costs: {table.text}", soft_wrap=True)
    return table.costs
