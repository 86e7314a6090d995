"""Notes of runs: traces in files, ranges for profilers."""

from __future__ import annotations

import logging
from functools import partial

from mdfuse.config import Options, options_from_environment
from mdfuse.plan.build import Plan
from mdfuse.plan.ranges import ranged
from mdfuse.plan.traced import traced
from mdfuse.runtime.communicator import Communicator
from mdfuse.seeing.trace_files import TraceFile, trace_file

_LOG = logging.getLogger("mdfuse.trace")

#: How long a rank waits for another one when clocks are aligned at the end, seconds.
_LAST_S = 2.0


def trace_of(options: Options | None, communicator: Communicator) -> TraceFile | None:
    """Return the file into which runs are traced; None where they are not.

    Raises:
        ProgramError: it cannot be written.
    """
    folder = options_from_environment(options).trace
    if folder is None:
        return None
    return trace_file(folder, communicator.rank, communicator.size)


def noted(plan: Plan, options: Options | None, communicator: Communicator) -> Plan:
    """Return a plan with the notes that the options ask for; without any, the plan itself."""
    ranges = options_from_environment(options).ranges
    if ranges != "none":
        plan = ranged(plan, ranges, communicator.rank)
    file = trace_of(options, communicator)
    return plan if file is None else traced(plan, file)


def align(options: Options | None, communicator: Communicator, serial: int) -> None:
    """Align the clocks of ranks whose runs are traced, now and when the communicator is closed.

    Clocks drift apart: times between two alignments get an offset between the two offsets.
    """
    file = trace_of(options, communicator)
    if file is not None:
        file.clock(*communicator.clock_offset(f"clock/{serial}"))
        communicator.at_end["clocks"] = partial(_last, file, communicator)


def _last(file: TraceFile, communicator: Communicator) -> None:
    """Align clocks once more; a rank that has gone already is not waited for."""
    try:
        file.clock(*communicator.clock_offset("clock/last", _LAST_S))
    except RuntimeError as error:  # the store's own error, for a rank that does not come
        _LOG.info("rank %d: clocks were not aligned at the end: %s", file.rank, error)
