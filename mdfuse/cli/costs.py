"""Tables of costs by name: `--costs h100`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mdfuse.cli import screen
from mdfuse.errors import ProgramError
from mdfuse.seeing.cost_tables import FORMAT, costs_of, found, machine_of, parsed
from mdfuse.seeing.costs import H100, UNIT, Costs

#: Tables that are not measured.
_NAMED = {"h100": H100, "unit": UNIT}

#: The table of this machine.
_HERE = "here"


def costs_named(text: str | None) -> Costs | None:
    """Return a table of costs by its name, that of this machine, or that of a JSON file.

    Raises:
        ProgramError: there is no such table, or the file does not hold one.
    """
    if text is None or text in _NAMED:
        return _NAMED[text] if text is not None else None
    if text == _HERE:
        return _here()
    try:
        fields = json.loads(Path(text).read_text(encoding="utf-8"))
        if isinstance(fields, dict) and "format" in fields:
            return parsed(json.dumps(fields)).costs
        return costs_of({"name": Path(text).stem, **fields})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _wrong(text, str(error)) from error
    except ProgramError as error:
        raise _wrong(text, error.because or error.what) from error


def _wrong(text: str, why: str) -> ProgramError:
    return ProgramError(
        f"costs {text}",
        because=why,
        hint=f"one of {', '.join(_NAMED)}, here, what mdfuse calibrate wrote, or a JSON file of "
        f'the fields of mdfuse.seeing.Costs; a calibration says "format": "{FORMAT}"',
    )


def _here() -> Costs:
    """Return the table of this machine, and say which one it is and why it is no other."""
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    machine = machine_of(device, "nccl" if is_gpu else "gloo")
    table, told = found(machine, any_threads=True)
    console = screen.output()
    for line in told:
        console.print(line, soft_wrap=True)
    if table is None:
        raise ProgramError(
            "there is no table of costs of this machine",
            because=f"nothing was measured on {machine.text}",
            hint="torchrun --nproc-per-node 2 -m mdfuse calibrate",
        )
    console.print(f"costs: {table.text}", soft_wrap=True)
    return table.costs
