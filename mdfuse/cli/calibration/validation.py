"""The errors of predicted times, on programs that a calibration did not see."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from mdfuse.cli.calibration.measuring import call_of
from mdfuse.cli.calibration.sampling import QUEUED, seconds_of
from mdfuse.compiled.program import Program
from mdfuse.runtime.communicator import Communicator
from mdfuse.seeing.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A program, and its predicted and its measured time.

    Attributes:
        name: of the program.
        predicted_s: by the table.
        measured_s: the median.
    """

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def pair(comm: Communicator, program: Program, costs: Costs) -> Pair:
    """Predict and measure a program; all ranks call it, and get the median over ranks."""
    mine = seconds_of(comm, call_of(comm, program), QUEUED)
    texts = comm.all_ok(json.dumps(mine))
    measured = statistics.median(json.loads(text) for text in texts if text is not None)
    predicted = program.timeline(costs).seconds
    return Pair(name=program.host.name, predicted_s=predicted, measured_s=measured)


def errors(pairs: list[Pair]) -> tuple[float, float]:
    """Return the mean error, and the 95th percentile."""
    offs = [p.error for p in pairs]
    return statistics.mean(offs), statistics.quantiles(offs, n=20, method="inclusive")[-1]
