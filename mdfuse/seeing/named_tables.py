"""Tables of costs by name: "h100", "unit", "here", or a JSON file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from mdfuse.errors import ProgramError
from mdfuse.interpreter.json_text import from_json
from mdfuse.seeing.cost_tables import FORMAT, CostTable, costs_of, find_table, machine_of, parsed
from mdfuse.seeing.costs import H100, UNIT, Costs

#: Tables that are not measured.
NAMED = {"h100": H100, "unit": UNIT}

#: The table of this machine.
HERE = "here"


def named(text: str, backend: str = "auto") -> tuple[Costs, float]:
    """Return a table of costs that is named, or that of a JSON file, and its mean error.

    The error is of predictions on the measured machine; 0 for other tables.

    Args:
        text: the name, or the path of the file.
        backend: the usual one of the programs that are asked about.

    Raises:
        ProgramError: there is no such table, or the file does not hold one.

    >>> costs, error = named("unit")
    >>> costs.launch_s, error
    (1.0, 0.0)
    """
    if text in NAMED:
        return NAMED[text], 0.0
    try:
        fields = from_json(Path(text).read_text(encoding="utf-8"))
        if isinstance(fields, dict) and "format" in fields:
            table = parsed(json.dumps(fields))
            return table.by(backend).costs, table.mean_error
        costs = costs_of({"name": Path(text).stem, **fields})
        return costs.by(backend) or costs, 0.0
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _wrong(text, str(error)) from error
    except ProgramError as error:
        raise _wrong(text, error.because or error.what) from error


def told_apart(text: str, backend: str = "auto") -> str:
    """Return a line that identifies a table of costs: its name, and a digest of it.

    Args:
        text: the name, or the path of a file.
        backend: the usual one of the programs that are asked about.

    >>> told_apart("unit") == told_apart("unit"), told_apart("unit") == told_apart("h100")
    (True, False)
    """
    try:
        if text != HERE:
            costs, _ = named(text, backend)
        else:
            table, reasons = table_here(backend)
            if table is None:
                return reasons[-1]
            costs = table.costs
    except ProgramError as error:  # the file was removed since
        return f"{error.what}: {error.because}"
    return f"{costs.name} ({hashlib.sha256(repr(costs).encode()).hexdigest()[:8]})"


def _wrong(text: str, why: str) -> ProgramError:
    return ProgramError(
        f"costs {text}",
        because=why,
        hint=f"one of {', '.join(NAMED)}, here, what mdfuse calibrate wrote, or a JSON file of "
        f'the fields of mdfuse.seeing.Costs; a calibration says "format": "{FORMAT}"',
    )


def table_here(backend: str = "auto") -> tuple[CostTable | None, list[str]]:
    """Return the table of this machine, None where there is none, and the reasons.

    Args:
        backend: the usual one of the programs that are asked about.
    """
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    usual = "nccl" if is_gpu else "gloo"
    table, reasons = find_table(machine_of(device, usual), any_threads=True)
    if table is None:
        return None, [*reasons, f"nothing was measured on {machine_of(device, usual).text}"]
    if backend not in ("auto", usual):
        table = table.by(backend)
        if table.machine.backend != backend:
            reasons = [
                *reasons,
                f"nothing was measured with {backend}: it is taken to be like {usual}",
            ]
    if not table.costs.links:
        text = "no communication was measured: they are taken to take no time"
        reasons = [*reasons, f"{text}; mdfuse calibrate on several ranks"]
    return table, reasons
