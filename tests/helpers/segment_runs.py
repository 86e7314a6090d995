"""Programs run segment by segment, as a user would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mdfuse as mf
from helpers.oracle import POISON
from mdfuse.compiled.segments import Segment

#: What runs a segment on its arguments.
Run = Callable[[Segment, list[Any]], Sequence[Any]]


def by_hand(program: mf.Program, inputs: Sequence[Any], run: Run) -> list[Any]:
    """The outputs of a program whose segments run one by one."""
    ids = program.fusion.ids
    values = {ids[name]: x for name, x in zip(program.fusion.inputs, inputs, strict=True)}
    for segment, last in zip(program.segments, program.last_uses, strict=True):
        results = run(segment, [values[segment.map[i]] for i in segment.inputs])
        made = (segment.map[i] for i in segment.outputs)
        values.update(zip(made, results, strict=True))
        for i in last:
            del values[i]
    outputs = [ids[name] for name in program.fusion.outputs]
    unread = {ids[n] for n in program.fusion.inputs if not program.fusion.consumers[n]}
    assert values.keys() == {*outputs, *unread}, "what is not needed is dropped"
    return [values[i] for i in outputs]


def simulated(program: mf.Program, given: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Each output as every rank holds it; `given` has each rank's inputs by name."""

    def run(segment: Segment, arguments: list[Any]) -> list[tuple[Any, ...]]:
        ranks = range(segment.program.host.last_rank + 1)
        rows = [
            {name: x[rank] for name, x in zip(segment.fusion.inputs, arguments, strict=True)}
            for rank in ranks
        ]
        got = mf.simulate(segment.program, per_rank=rows, options=POISON).per_rank
        values = segment.fusion.values
        return [
            tuple(got[r][i] if r in ranks else None for r in range(len(given)))
            if values[name].is_tensor
            else (got[0][i],) * len(given)
            for i, name in enumerate(segment.fusion.outputs)
        ]

    inputs = [tuple(row.get(name) for row in given) for name in program.fusion.inputs]
    return by_hand(program, inputs, run)
