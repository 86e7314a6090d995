"""A step of a reshard, and its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mdfuse.communication import Communication
from mdfuse.layouts.exchange import kept_terms
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.recv_volume import UNIT, arriving, dearer, lacks, part_size, weighed
from mdfuse.reshard.clock import EXCHANGES, crossing_of, messages_of, nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A step without communication.

    "slice": each rank keeps a part of its part. "term": it becomes Partial, one rank with the value
    and the others with the reduce op's neutral element. "empty": the tensor has no elements.
    """

    kind: str
    source: Layout
    destination: Layout


Step = Local | Communication


def elements(step: Step, shape: tuple[int, ...]) -> int:
    """Return `UNIT` times the elements that a rank receives, with padding."""
    if isinstance(step, Local):
        return 0
    if step.kind in EXCHANGES:
        return UNIT * _exchanged(step, shape)[0]
    before, after = (part_size(x, shape) for x in (step.source, step.destination))
    if not step.is_along_axes:
        return UNIT * (after if step.kind == "Scatter" else max(before, after))
    return arriving(step.kind, step.size, before, after)


def _exchanged(step: Communication, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the largest and the average receive volume of an exchange."""
    copies = 0
    if step.reduce_op is not None:
        staying = dict(kept_terms(step.source, step.destination))
        reduced = (a for a in step.source.partial_axes if a not in staying)
        copies = math.prod(map(step.source.mesh.axis_size, reduced)) - 1
    return lacks(step.source, step.destination, shape, copies)


def step_cost(step: Step, shape: tuple[int, ...]) -> int:
    """Return the cost of a step with unknown hosts, for comparison with other paths."""
    if isinstance(step, Local) or step.kind not in EXCHANGES:
        return elements(step, shape)
    worst, average = _exchanged(step, shape)
    cost = weighed(UNIT * worst, average)
    return dearer(cost) if step.reduce_op is not None else cost


def step_time(step: Step, shape: tuple[int, ...], itemsize: int, limit: float = math.inf) -> int:
    """Return the time of a step in nanoseconds, between meshes with known hosts.

    For a step over the limit, a lower bound over the limit suffices.
    """
    if isinstance(step, Local):
        return 0
    arrives = elements(step, shape)
    least = nanoseconds(1, arrives, 0, itemsize)
    if least > limit:
        return least
    crosses = crossing_of(step, shape)
    least = nanoseconds(1, arrives, crosses, itemsize)
    if least > limit:
        return least
    return nanoseconds(messages_of(step, shape), arrives, crosses, itemsize)
