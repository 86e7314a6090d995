"""Give one fuzzer many inputs, and report what is neither an answer nor an error of mdfuse.

A fuzzer is a function of a random number generator: it draws an input, uses it, and compares what
comes back with an independent reference where there is one. It may return, or raise MdfuseError.
Anything else is a finding: another exception, a failed comparison, more than
`LIMIT_S` of processor time.
Each input has a seed of its own, so that a finding can be repeated alone.
"""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from mdfuse.errors import PACKAGE, MdfuseError

Fuzzer = Callable[[random.Random], None]

#: Seconds of processor time that one input may take; not of the clock, so that a busy
#: machine breaks nothing. A drawn program is lowered ten times with its options, a second each.
LIMIT_S = 60.0


class TooLong(Exception):
    """One input took more than its processor time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What went wrong, and the seed of the first input that did it."""

    seed: int
    place: str
    text: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.place}\n{self.text}"


def fuzz(fuzzer: Fuzzer, inputs: int, seed: int) -> list[Finding]:
    """Run a fuzzer on inputs of the seeds seed, seed + 1, ...; one finding per place in the code.

    Args:
        fuzzer: draws an input and uses it.
        inputs: how many.
        seed: of the first one.
    """
    found: dict[str, Finding] = {}
    for number in range(seed, seed + inputs):
        finding = once(fuzzer, number)
        if finding is not None:
            found.setdefault(finding.place, finding)
    return list(found.values())


def once(fuzzer: Fuzzer, seed: int) -> Finding | None:
    """What is wrong with the input of one seed."""
    try:
        with _processor_time(LIMIT_S):
            fuzzer(random.Random(seed))
    except MdfuseError as error:
        if not error.what.strip():
            return Finding(seed, f"{type(error).__name__} without words", _trace(error))
    except (Exception, RecursionError) as error:
        return Finding(seed, _place(error), _trace(error))
    return None


def _place(error: BaseException) -> str:
    """The type of an exception, and the last line of mdfuse or of the fuzzer that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(PACKAGE)] or frames
    return f"{type(error).__name__} at {own[-1].filename.removeprefix(PACKAGE)}:{own[-1].lineno}"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-12:])


@contextmanager
def _processor_time(limit_s: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {limit_s:.0f} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
